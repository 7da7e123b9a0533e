"use strict";
// What both pages share: their records, small parts, and how one record is drawn (a chain, with or
// without what is trained, or an episode of a team). Every text of a record reaches the page as a
// text node: nothing here parses markup, and the policy of the page would refuse it. `inspect.js`
// or `report.js` follows in the same script.

const FOLD = 280; // longer texts that no model wrote are folded
const LANE = 15; // pixels between the lines of two agents
const CROWD = 8; // more lines than these are left out where they would take the place of the text
const SVG = "http://www.w3.org/2000/svg";

const byId = (id) => document.getElementById(id);
const page = JSON.parse(byId("page").textContent);
const chunks = JSON.parse(byId("records").textContent);
const looks = new Map(Object.entries(page.looks));
const colourOf = (name) => looks.get(name)?.colour || undefined;
const shape = { masked: false, unfolded: false }; // what is trained is shown; nothing is folded

// -- small parts ----------------------------------------------------------------------------

function put(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== ""));
  return node;
}

const el = (tag, attributes, ...children) => put(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  put(document.createElementNS(SVG, tag), attributes, children);

const number = (value) => value.toLocaleString("en", { maximumFractionDigits: 4 });
const plural = (count, noun) => `${number(count)} ${count === 1 ? noun.replace(/s$/, "") : noun}`;
const size = (text) => plural(text.length, "characters");
const said = (text, kind = "") => el("div", { dir: "auto", class: `text ${kind}` }, text);
const coloured = (tag, name) => el(tag, { "data-colour": colourOf(name) }, name);
const flag = (name, title) => el("span", { class: `flag ${name}`, title }, name);
const fold = (heading, text, kind) =>
  el("details", { class: "more" }, el("summary", {}, heading), said(text, kind));

function folded(text, limit = FOLD) {
  if (text.length <= limit) return text ? said(text, "quiet") : said("(nothing)", "quiet");
  const peek = text.trim().slice(0, 150).replace(/\s+/g, " ");
  const heading = [el("span", { class: "peek", dir: "auto" }, `${peek} ... `), el("small", {}, size(text))];
  return el("details", { class: "long", open: shape.unfolded && "" },
    el("summary", {}, heading), said(text, "quiet"));
}

function table(kind, head, rows) {
  const cells = (tag, texts) => texts.map((text) => el(tag, { dir: "auto" }, text));
  return el("div", { class: "wide" }, el("table", { class: kind },
    el("thead", {}, el("tr", {}, cells("th", head))),
    el("tbody", {}, rows.map((texts) => el("tr", {}, cells("td", texts))))));
}

// A box that puts a name into a set of chosen ones, or takes it out.
function chip(name, title, chosen, changed, ...label) {
  const box = el("input", { type: "checkbox", value: name });
  box.addEventListener("change", () => { chosen[box.checked ? "add" : "delete"](name); changed(); });
  return el("label", { class: "chip", title }, box, label);
}

// The field for a search, which begins when somebody has stopped typing.
function listen(changed) {
  let waiting = 0;
  byId("query").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(changed, 150); });
  document.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
}

const notice = (text) => el("p", { class: "notice" }, text);

window.addEventListener("beforeprint", () => {
  document.querySelectorAll("details.long").forEach((each) => { each.open = true; });
});

// A chunk of records: JSON, deflated, in base64.
async function inflated(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

// -- one chain ------------------------------------------------------------------------------

// A part of a text as nodes; what lies in a mistake is marked.
function marked({ text, errs }, from, to) {
  const nodes = [];
  for (const [start, end] of errs) {
    if (end <= from || start >= to) continue;
    nodes.push(text.slice(from, Math.max(from, start)));
    const begins = start >= from; // a mistake that goes on after a tag is labelled once
    from = Math.max(from, start);
    nodes.push(el("mark", { class: begins && "begins" }, text.slice(from, Math.min(to, end))));
    from = Math.min(to, end);
  }
  return [...nodes, text.slice(from, to)];
}

function block(who, colour, flags, body, kind = "") {
  const label = el("div", { class: "who" }, el("b", {}, who), flags.map((name) => flag(name)));
  return el("li", { class: `block ${kind}`, "data-colour": colour }, label, el("div", { class: "body" }, body));
}

function readChain(record) {
  return el("ol", { class: "chain" }, record.segments.map((segment) => {
    if (segment.author === "model") return modelBlocks(segment);
    if (segment.author === "env") return block(segment.role, undefined, [], folded(unwrapped(segment)));
    return block("prompt", undefined, [], fold(`system prompt, ${size(segment.text)}`, segment.text, "quiet"));
  }));
}

function unwrapped({ text, role }) {
  const [inner, open, close] = [text.trim(), `<${role}>`, `</${role}>`];
  const whole = inner.startsWith(open) && inner.endsWith(close);
  return whole ? inner.slice(open.length, -close.length).trim() : inner;
}

function modelBlocks(segment) {
  const { text, blocks, errs, faults } = segment;
  const nodes = [];
  let end = 0;
  const outside = (to) => {
    const stray = text.slice(end, to).trim();
    if (stray) nodes.push(block("no block", "red", ["malformed"], said(stray)));
  };
  for (const [role, from, to] of blocks) {
    outside(from);
    let [start, stop] = [from + role.length + 2, to - role.length - 3];
    while (start < stop && /\s/.test(text[start])) start += 1;
    while (start < stop && /\s/.test(text[stop - 1])) stop -= 1;
    const wrong = errs.some((span) => span[0] < to && from < span[1]);
    const body = said(marked(segment, start, stop), looks.get(role)?.kind);
    nodes.push(block(role, colourOf(role), wrong ? ["mistake"] : [], body));
    end = to;
  }
  outside(text.length);
  return [...nodes, ...faults.map((fault) => block("fault", "red", [], said(fault, "quiet")))];
}

function maskedChain(record, entry) {
  const total = Object.values(record.marks).reduce((sum, count) => sum + count, 0) || 1;
  const legend = ["trained", "mistake", "not trained"].map((kind) => {
    const count = record.marks[kind] || 0;
    const amount = ` ${number(count)} characters, ${(100 * count / total).toFixed(1)}%`;
    return el("li", { class: kind.replace(" ", "-") }, el("i"), el("b", {}, kind), amount);
  });
  let turn = 0;
  const rows = record.segments.map((segment) => {
    const own = segment.author === "model";
    const who = own ? `turn ${(turn += 1)}` : segment.role || "prompt";
    const body = said(own ? withTags(segment) : segment.text, "raw");
    return block(who, undefined, [own ? "trained" : "not trained"], body, own ? "trained" : "untrained");
  });
  const asked = block("question", undefined, ["not trained"], said(entry.question, "raw"), "untrained");
  rows.splice(record.segments[0]?.author === "prompt" ? 1 : 0, 0, asked);
  return [el("ul", { class: "legend" }, legend),
    el("p", { class: "note" }, "The text as it is, tags and line ends included. A mistake has weight 0 in training ",
      "unless a recipe says otherwise; prompt, question, chat template and observations are never trained."),
    el("ol", { class: "chain mask" }, rows)];
}

function withTags(segment) {
  const nodes = [];
  let end = 0;
  for (const [role, from, to] of segment.blocks) {
    const [start, stop] = [from + role.length + 2, to - role.length - 3];
    const tag = (a, b) => el("span", { class: "tag", "data-colour": colourOf(role) }, marked(segment, a, b));
    nodes.push(marked(segment, end, from), tag(from, start), marked(segment, start, stop), tag(stop, to));
    end = to;
  }
  return [...nodes, marked(segment, end, segment.text.length)];
}

// -- one episode ----------------------------------------------------------------------------

function readEpisode(record) {
  const agents = record.agents.map(([name, part, prompt]) => {
    const heading = [coloured("b", name), part === name ? "" : ` (${part})`,
      el("small", {}, ` prompt, ${size(prompt)}`)];
    return fold(heading, prompt, "raw");
  });
  const spent = ["agent", "model", "calls", "tokens in", "cached", "tokens out", "cost"];
  const events = joined(record.events);
  const active = new Set(events.flatMap((event) => [event.agent, event.to]).filter(Boolean));
  const known = ["user", ...record.agents.map(([name]) => name)];
  const names = [...new Set([...known.filter((name) => active.has(name)), ...active])];
  return [el("section", { class: "team" }, el("h3", {}, "The team"), agents,
    record.spent.length ? table("spent", spent, record.spent) : null),
  el("h3", {}, "What happened"),
  el("section", { class: names.length > CROWD && "crowded" },
    el("div", { class: "names", "aria-hidden": "true" }, names.map((name) => coloured("span", name))),
    events.length ? null : said("Nothing was recorded.", "quiet"),
    el("ol", { class: "events" }, together(events).map((each) =>
      Array.isArray(each) ? concurrent(each, names) : happening(each, names))))];
}

// A query that an agent hands to the code around it, and the call that follows, are one thing.
function joined(events) {
  const kept = [];
  for (const event of events) {
    const last = kept[kept.length - 1];
    const asked = last && event.tool !== undefined && last.tool === undefined && last.agent === event.agent
      && last.branch === event.branch && last.text === event.text;
    if (asked) kept.pop();
    kept.push(asked ? { ...last, ...event, to: undefined } : event);
  }
  return kept;
}

// Events in branches that follow each other happened at the same time: one group of branches.
function together(events) {
  const kept = [];
  for (const event of events) {
    const last = kept[kept.length - 1];
    if (!event.branch) kept.push(event);
    else if (Array.isArray(last)) last.push(event);
    else kept.push([event]);
  }
  return kept;
}

function concurrent(events, names) {
  const branches = [...new Set(events.map((event) => event.branch))];
  const title = branches.length === 1 ? "In a branch" : `At the same time, in ${number(branches.length)} branches`;
  return el("li", { class: "together" }, el("h4", {}, title),
    branches.map((branch) => el("section", {}, el("h5", {}, `Branch ${branch}`),
      el("ol", { class: "events" }, events.filter((event) => event.branch === branch)
        .map((event) => happening(event, names))))));
}

function happening(event, names) {
  const uses = event.tool !== undefined;
  const alone = event.to === event.agent;
  const title = el("div", { class: "who" }, el("b", {}, event.agent),
    uses ? [" uses ", el("code", {}, event.tool)] : alone ? " notes" : [" to ", coloured("b", event.to)],
    event.part ? el("span", { class: "flag" }, event.part) : null, event.erred ? flag("mistake") : null);
  const own = event.erred ? el("mark", {}, event.text) : event.text;
  const body = [event.thought ? said(event.thought, "think") : null,
    uses ? said(own, "tool") : looks.has(event.agent) ? said(own) : folded(event.text, FOLD / 2),
    event.failure ? said(`failed: ${event.failure}`, "failure") : null,
    uses ? folded(event.result) : null,
    event.facts ? fold("facts", event.facts, "raw") : null,
    event.call ? fold(event.call.line, event.call.text, "raw") : null,
    event.call?.given ? fold("what the model was given", event.call.given, "raw") : null];
  return el("li", { class: "event", "data-colour": colourOf(event.agent) },
    lanes(names, event.agent, uses || alone ? event.agent : event.to), el("div", { class: "body" }, title, body));
}

// A strip of a sequence diagram: a line for each agent, and an arrow from who speaks to who hears.
function lanes(names, from, to) {
  const [a, b] = [from, to].map((name) => names.indexOf(name) * LANE + LANE / 2);
  const lines = names.map((_, at) => svg("line", { x1: (at + 0.5) * LANE, x2: (at + 0.5) * LANE, y1: 0, y2: "100%" }));
  const back = b + (a < b ? -5 : 5); // where the strokes of the arrow's head begin
  const arrow = `M${a} 12H${b}M${back} 7.5L${b} 12L${back} 16.5`;
  const mark = a === b ? svg("rect", { x: a - 4.5, y: 7.5, width: 9, height: 9 })
    : [svg("circle", { cx: a, cy: 12, r: 3.5 }), svg("path", { d: arrow })];
  const width = names.length * LANE;
  const strip = el("div", { class: "lanes", "aria-hidden": "true" }, svg("svg", { width, height: "100%" }, lines, mark));
  strip.style.width = `${width}px`;
  return strip;
}
