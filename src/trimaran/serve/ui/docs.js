// Shows openapi.json: each operation with the fields of its body.

import "./theme.js";

const main = document.getElementById("operations");

function element(tag, text = "", parts = []) {
  const made = document.createElement(tag);
  made.textContent = text;
  made.append(...parts);
  return made;
}

function typeOf(schema, all) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return [...new Set(schema.anyOf.map((one) => typeOf(one, all)))].join(" | ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${typeOf(schema.items || {}, all)}`;
  return schema.type || "any";
}

function fields(name, all) {
  const schema = all[name];
  const rows = Object.entries(schema.properties || {}).map(([field, own]) => {
    const needed = (schema.required || []).includes(field) ? "required" : "";
    const preset = own.default === undefined || own.default === null ? "" : JSON.stringify(own.default);
    return element("tr", "", [field, typeOf(own, all), needed || preset].map((text) => element("td", text)));
  });
  const head = element("tr", "", ["Field", "Type", "Default"].map((text) => element("th", text)));
  return element("details", "", [
    element("summary", `${name}: ${schema.description || ""}`),
    element("table", "", [element("thead", "", [head]), element("tbody", "", rows)]),
  ]);
}

function named(schema, all, found = new Set()) {
  const text = JSON.stringify(schema);
  for (const [, name] of text.matchAll(/#\/components\/schemas\/(\w+)/g)) {
    if (!found.has(name)) {
      found.add(name);
      named(all[name], all, found);
    }
  }
  return found;
}

const api = await (await fetch("openapi.json")).json();
const all = api.components?.schemas || {};
for (const [path, methods] of Object.entries(api.paths)) {
  for (const [method, operation] of Object.entries(methods)) {
    const title = element("h2", "", [
      Object.assign(element("span", method.toUpperCase()), { className: "method" }),
      element("code", path),
    ]);
    const body = operation.requestBody ? [...named(operation.requestBody, all)] : [];
    main.append(
      element("section", "", [title, element("p", operation.description || operation.summary || ""), ...body.map((name) => fields(name, all))]),
    );
  }
}
main.setAttribute("aria-busy", "false");
