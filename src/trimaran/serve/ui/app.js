// Asks the server twice a second what its engine does, and shows it.

import "./theme.js";
import { duration } from "./charts.js";
import { headers } from "./chat.js";

const SECONDS = 20; // of the step chart
const PAUSE = 500; // milliseconds between two questions
const byId = (id) => document.getElementById(id);
let steps = [];
let tokens = null; // {count, time} at the last answer
let rounds = 0;

async function ask(path) {
  const response = await fetch(path, { headers: headers() });
  const body = await response.json();
  if (!response.ok) throw new Error(body.error.message);
  return body;
}

function showFigures(state) {
  const { blocks, prefix_cache: prefix } = state;
  const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");
  byId("model").textContent =
    `${state.server.model} · ${state.server.backend.isa || state.server.backend.backend} · ` +
    `up to ${state.server.max_model_len} tokens · ${state.server.phase}`;
  byId("running").textContent = state.running;
  byId("waiting").textContent = state.waiting;
  byId("hits").textContent = percent(prefix.hit, prefix.queried);
  byId("held").textContent = percent(blocks.held, blocks.total);
  const before = tokens;
  tokens = { count: state.generated_tokens, time: state.now };
  if (before && state.now > before.time) {
    const rate = (tokens.count - before.count) / (tokens.time - before.time);
    byId("throughput").textContent = rate.toFixed(rate < 100 ? 1 : 0);
  }
}

function showSteps(state) {
  if (state.step < (steps.at(-1)?.number ?? 0)) steps = []; // the server was started anew
  steps.push(...state.steps);
  steps = steps.filter((step) => step.begin > state.now - SECONDS);
  const last = steps.at(-1);
  const words = last
    ? `Last step: ${last.prefill_tokens} rows of prefill, ${last.decode_tokens} of decode, ` +
      `in ${duration(last.seconds)}.`
    : "No steps lately.";
  byId("steps").show({ steps, now: state.now, seconds: SECONDS }, words);
}

function showHistograms(latency) {
  for (const [name, data] of Object.entries(latency)) {
    const all = data.counts.reduce((sum, count) => sum + count, 0);
    let below = 0;
    const at = data.counts.findIndex((count) => (below += count) >= all / 2);
    const words = all
      ? `${all} values, half of them below ${duration(data.bounds[at] ?? Infinity)}`
      : "No values yet";
    byId(name).show(data, words);
  }
}

function showRequests({ running, waiting }) {
  const rows = [
    ...running.map((request) => ["running", request]),
    ...waiting.map((request) => ["waiting", request]),
  ].map(([state, r]) => {
    const row = document.createElement("tr");
    const cells = [r.id, state, r.age.toFixed(1), r.prompt_tokens, r.cached_tokens, r.computed_tokens, r.output_tokens];
    row.append(...cells.map((value) => Object.assign(document.createElement("td"), { textContent: value })));
    return row;
  });
  byId("requests").replaceChildren(...rows);
}

async function update() {
  const last = steps.at(-1)?.number ?? -1;
  const state = await ask(`debug/state?since=${last}`);
  showFigures(state);
  showSteps(state);
  showHistograms(state.latency);
  showRequests(state.requests);
  if (rounds++ % 2 === 0) {
    const { total, free, held, cached } = state.blocks;
    const words = `Of ${total} blocks ${held} are held, ${cached} cached, ${free} free.`;
    byId("blocks").show(await ask("debug/blocks"), words);
  }
}

async function watch() {
  for (;;) {
    if (!document.hidden) {
      try {
        await update();
        byId("trouble").textContent = "";
      } catch (error) {
        byId("trouble").textContent = error.message;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, PAUSE));
  }
}

watch();
