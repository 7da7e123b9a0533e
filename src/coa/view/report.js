// The chains of a report: which are listed, and one or two of them side by side.

const FEW = 4; // chains of an outcome that are listed at first
const STEP = 40; // and so many more when somebody asks for them

let records = []; // in the order of page.entries
const chosen = new Set(); // outcomes

const entriesOf = (run) => page.entries.filter((entry) => entry.run === run);
const partner = (entry, run) => page.entries.find((each) => each.run === run && each.task === entry.task);
const recordOf = (entry) => records[page.entries.indexOf(entry)];
const isRight = (entry) => entry.score !== null && entry.score >= 1;

// -- what can be chosen ---------------------------------------------------------------------

function fillMenus() {
  const shown = page.runs.map((_, at) => at).filter((at) => entriesOf(at).length);
  const option = (at) => el("option", { value: at }, page.runs[at]);
  const menu = byId("run");
  menu.append(...shown.map(option));
  const worth = (at) => (page.controls[at] ? -1 : page.accuracy[at]);
  menu.value = shown.reduce((best, at) => (worth(at) > worth(best) ? at : best), shown[0]);
  menu.addEventListener("change", () => { fillBeside(); refresh(); });
  byId("beside").addEventListener("change", refresh);
  fillBeside();
}

function fillBeside() {
  const run = Number(byId("run").value);
  const tasks = new Set(entriesOf(run).map((entry) => entry.task));
  const fits = page.runs.map((_, at) => at)
    .filter((at) => at !== run && entriesOf(at).some((entry) => tasks.has(entry.task)));
  const kept = byId("beside").value;
  byId("beside").replaceChildren(el("option", { value: "" }, "nothing"),
    ...fits.map((at) => el("option", { value: at }, page.runs[at])));
  if (fits.some((at) => String(at) === kept)) byId("beside").value = kept;
  byId("beside").disabled = !fits.length;
  chosen.clear();
  fillOutcomes(run);
}

function fillOutcomes(run) {
  const field = byId("outcomes");
  field.replaceChildren(el("legend", {}, "Only"));
  const add = (name, label, meaning) => field.append(chip(name, meaning, chosen, refresh, label));
  for (const [name, meaning] of Object.entries(page.outcomes)) {
    if (entriesOf(run).some((entry) => entry.outcome === name)) add(name, name, meaning);
  }
  if (!byId("beside").disabled) add("differs", "one right, the other not", "of the two runs that are side by side");
}

// -- the list -------------------------------------------------------------------------------

function holds(entry, words) {
  const texts = [entry.question, entry.answer || "", entry.family, entry.task, ...(entry.gold || [])];
  return [...texts, ...recordOf(entry).segments.map((segment) => segment.text)]
    .some((text) => text.toLowerCase().includes(words));
}

function found() {
  const [run, beside] = [Number(byId("run").value), byId("beside").value];
  const words = byId("query").value.trim().toLowerCase();
  const outcomes = [...chosen].filter((name) => name !== "differs");
  return entriesOf(run).map((entry) => [entry, beside === "" ? undefined : partner(entry, Number(beside))])
    .filter(([entry]) => !outcomes.length || outcomes.includes(entry.outcome))
    .filter(([entry, other]) => !chosen.has("differs") || (other && isRight(entry) !== isRight(other)))
    .filter((pair) => !words || pair.some((entry) => entry && holds(entry, words)));
}

function refresh() {
  const run = Number(byId("run").value);
  const cases = found();
  const nodes = [];
  for (const name of Object.keys(page.outcomes)) {
    const own = cases.filter(([entry]) => entry.outcome === name);
    if (own.length) nodes.push(...group(name, own, page.counts[run][name] || own.length));
  }
  if (!cases.length) nodes.push(notice("Nothing fits."));
  byId("list").replaceChildren(...nodes);
  const all = entriesOf(run).length;
  byId("count").textContent = cases.length === all ? plural(all, "chains") : `${number(cases.length)} of ${plural(all, "chains")}`;
}

// The chains of one outcome: a few at first, so that all outcomes can be seen.
function group(name, own, total) {
  const rest = own.map(([entry, other]) => () => card(entry, other));
  const heading = el("h3", {}, name[0].toUpperCase() + name.slice(1),
    el("small", {}, `${number(own.length)} here, ${number(total)} in the run: ${page.outcomes[name]}`));
  const first = rest.splice(0, FEW).map((draw) => draw());
  const label = () => `Show ${number(Math.min(STEP, rest.length))} more`;
  const more = el("button", { type: "button", class: "more-cases" }, label());
  more.addEventListener("click", () => {
    more.before(...rest.splice(0, STEP).map((draw) => draw()));
    if (rest.length) more.textContent = label();
    else more.remove();
  });
  return [heading, ...first, ...(rest.length ? [more] : [])];
}

// -- one task -------------------------------------------------------------------------------

const badge = (entry) => el("span", { class: `flag ${entry.outcome}`, title: page.outcomes[entry.outcome] }, entry.outcome);

function card(entry, other) {
  const named = (each) => (other ? el("small", {}, el("bdi", {}, page.runs[each.run])) : null);
  const kinds = [entry, other].filter(Boolean).map((each) => el("span", {}, named(each), badge(each)));
  const right = entry.gold && !isRight(entry) ? [" \u00b7 right: ", el("bdi", {}, entry.gold.join(" | "))] : [];
  const node = el("details", { class: "case" }, el("summary", {},
    el("span", { class: "asked", dir: "auto" }, entry.question),
    el("span", { class: "given" }, el("b", { dir: "auto" }, entry.answer ?? "no answer"), right,
      entry.family ? [" \u00b7 ", el("bdi", {}, entry.family)] : null),
    el("span", { class: "kinds" }, kinds)));
  node.addEventListener("toggle", () => {
    if (node.open && !node.querySelector(".pair")) node.append(pairOf(entry, other));
  });
  return node;
}

function pairOf(entry, other) {
  const both = [entry, other].filter(Boolean);
  return el("div", { class: both.length > 1 ? "pair two" : "pair" }, both.map((each) => {
    const facts = [plural(each.calls, "tool calls"), plural(each.tokens, "tokens")];
    if (each.score !== null && each.score > 0 && each.score < 1) facts.push(`score ${number(each.score)}`);
    return el("div", {}, el("h4", {}, el("bdi", {}, page.runs[each.run]), badge(each),
      el("small", {}, facts.join(", "))), distinct(readChain(recordOf(each)), recordOf(each)));
  }));
}

// Observations look different from what the model wrote: they are another author's.
function distinct(chain, record) {
  const roles = new Set(record.segments.filter((segment) => segment.author === "env").map((segment) => segment.role));
  for (const node of chain.children) {
    if (roles.has(node.querySelector(".who b")?.textContent) && !node.dataset.colour) node.classList.add("seen");
  }
  return chain;
}

// -- the page -------------------------------------------------------------------------------

for (const part of document.querySelectorAll("main > section:not([hidden])")) {
  const name = part.id[0].toUpperCase() + part.id.slice(1);
  byId("contents").append(el("a", { href: `#${part.id}`, title: part.querySelector("h2").textContent }, name));
}

async function begin() {
  records = (await Promise.all(chunks.map(inflated))).flat();
  listen(refresh);
  fillMenus();
  refresh();
}

if (page.entries.length) {
  begin().catch((error) => {
    byId("list").replaceChildren(notice(`This browser cannot show the chains: ${error.message}`));
  });
}
