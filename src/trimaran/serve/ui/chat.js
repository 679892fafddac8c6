// The conversation: sends it to /v1/chat/completions and shows the answer as it streams.

const byId = (id) => document.getElementById(id);
const list = byId("messages");
const box = byId("message");
let history = [];
let running = null;

export function key() {
  return byId("key").value.trim();
}

export function headers() {
  return key() ? { Authorization: `Bearer ${key()}` } : {};
}

byId("key").value = sessionStorage.getItem("key") || "";
byId("key").addEventListener("change", () => sessionStorage.setItem("key", key()));

function show(role, text) {
  const item = document.createElement("li");
  item.className = role;
  const who = document.createElement("b");
  who.textContent = { user: "You", assistant: "Model", error: "Error" }[role];
  const said = document.createElement("span");
  said.textContent = text;
  item.append(who, said);
  list.append(item);
  list.scrollTop = list.scrollHeight;
  return said;
}

function busy(on) {
  byId("send").disabled = on;
  byId("stop").disabled = !on;
  list.setAttribute("aria-busy", String(on));
}

// The events of a stream, as they come.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function answer() {
  const system = byId("system").value.trim();
  const begin = performance.now();
  let first = 0;
  let text = "";
  let said = null;
  running = new AbortController();
  busy(true);
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      signal: running.signal,
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify({
        messages: [...(system ? [{ role: "system", content: system }] : []), ...history],
        temperature: Number(byId("temperature").value),
        max_tokens: Number(byId("max-tokens").value),
        stream: true,
        stream_options: { include_usage: true },
      }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const piece = event.choices[0]?.delta.content;
      if (piece) {
        first ||= performance.now();
        said ||= show("assistant", "");
        text += piece;
        const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
        said.textContent = text;
        if (atEnd) list.scrollTop = list.scrollHeight;
      }
      if (event.usage) tell(event.usage, begin, first, performance.now());
    }
  } catch (error) {
    if (error.name !== "AbortError") show("error", error.message);
  }
  if (text) history.push({ role: "assistant", content: text });
  running = null;
  busy(false);
}

function tell(usage, begin, first, end) {
  const count = usage.completion_tokens;
  const rate = count > 1 ? `${((count - 1) / ((end - first) / 1000)).toFixed(1)} tokens/s` : "";
  const cached = usage.prompt_tokens_details.cached_tokens;
  byId("rate").textContent =
    `first token after ${Math.round(first - begin)} ms; ${rate}; ` +
    `${usage.prompt_tokens} prompt tokens, ${cached} of them cached; ${count} out`;
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = box.value.trim();
  if (running || !text) return;
  box.value = "";
  history.push({ role: "user", content: text });
  show("user", text);
  answer();
});
box.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => {
  running?.abort();
  history = [];
  list.replaceChildren();
  byId("rate").textContent = "";
  box.focus();
});
