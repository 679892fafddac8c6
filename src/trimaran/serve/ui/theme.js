// Light or dark: as the system says, until the button was used.

const root = document.documentElement;
const button = document.getElementById("theme");
const system = matchMedia("(prefers-color-scheme: dark)");

function apply() {
  const theme = localStorage.getItem("theme") || (system.matches ? "dark" : "light");
  root.dataset.theme = theme;
  button.textContent = theme === "dark" ? "Light" : "Dark";
  dispatchEvent(new Event("resize"));
  document.querySelectorAll("step-chart, block-map, time-histogram").forEach((chart) => chart.draw?.());
}

button.addEventListener("click", () => {
  localStorage.setItem("theme", root.dataset.theme === "dark" ? "light" : "dark");
  apply();
});
system.addEventListener("change", apply);
apply();
