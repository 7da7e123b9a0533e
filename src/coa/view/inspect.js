// The page around a record: list, filters, summary, what was dropped, links and keys.

const placeOf = new Map(page.entries.map((entry, at) => [entry.id, at]));
const everywhere = new Set(Object.keys(page.flags) // what every entry has says nothing in a list
  .filter((name) => page.entries.every((entry) => entry.flags.includes(name))));
const main = byId("main");
const list = byId("list");
const STEP = 150; // rows that are added to the list at a time
const MOST = 2000; // rows of the table of what was dropped

const chosen = { set: "", family: "", sort: "", flags: new Set() };
let found = []; // places of the entries in the list, in its order
let current = -1; // place of the entry that is looked at
let drawing = 0; // number of the latest request to draw; an older one that arrives late is dropped
let searching = 0; // the same for searches

const linkTo = (id) => `#${encodeURIComponent(id)}`;
const pair = ([name, value]) => el("div", {}, el("dt", {}, name), el("dd", { dir: "auto" }, value));
const narrow = () => getComputedStyle(document.querySelector(".narrow")).display !== "none";

// -- records --------------------------------------------------------------------------------

const unpacked = new Map(); // the chunks that were looked at last

async function unpack(chunk) {
  if (!unpacked.has(chunk)) {
    unpacked.set(chunk, await inflated(chunks[chunk]));
    if (unpacked.size > 4) unpacked.delete(unpacked.keys().next().value);
  }
  return unpacked.get(chunk);
}

const recordAt = async (at) => (await unpack(Math.floor(at / page.chunk)))[at % page.chunk];

function textsOf(record) {
  if (record.segments) return record.segments.map((segment) => segment.text);
  return record.events.flatMap((event) => [event.text, event.thought, event.result].filter(Boolean));
}

// -- the list -------------------------------------------------------------------------------

function buildFilters() {
  const select = (key, label, options) => {
    const node = el("select", { id: `by-${key}`, "aria-label": label }, el("option", { value: "" }, label),
      options.map(([value, text]) => el("option", { value }, text)));
    node.addEventListener("change", () => { chosen[key] = node.value; refresh(); });
    byId("selects").append(node);
  };
  for (const [key, label] of [["set", "All sets"], ["family", "All families"]]) {
    const counts = new Map();
    for (const entry of page.entries) counts.set(entry[key], (counts.get(entry[key]) || 0) + 1);
    const options = [...counts].sort().map(([value, count]) => [value, `${value || "(none)"} (${count})`]);
    if (options.length > 1) select(key, label, options);
  }
  const differs = ([key]) => new Set(page.entries.map((entry) => entry.numbers[key])).size > 1;
  select("sort", "As in the file", Object.entries(page.numbers).filter(differs)
    .flatMap(([key, label]) => [[`-${key}`, `Most ${label}`], [`+${key}`, `Least ${label}`]]));
  for (const [name, meaning] of Object.entries(page.flags)) {
    const total = page.entries.filter((entry) => entry.flags.includes(name)).length;
    if (!total || everywhere.has(name)) continue;
    byId("flags").append(chip(name, meaning, chosen.flags, refresh, name, el("small", {}, number(total))));
  }
  byId("flags").hidden = !byId("flags").querySelector("input");
  listen(refresh);
  byId("whole").addEventListener("change", refresh);
}

function chosenOnes() {
  const fits = (entry) => (!chosen.set || entry.set === chosen.set)
    && (!chosen.family || entry.family === chosen.family)
    && [...chosen.flags].every((name) => entry.flags.includes(name));
  return [...page.entries.keys()].filter((at) => fits(page.entries[at]));
}

// The places whose texts hold the words, or undefined when somebody typed on meanwhile.
async function search(places, words, turn) {
  const holds = (texts) => texts.some((text) => text.toLowerCase().includes(words));
  const short = ({ question, answer, id, family }) => [question, answer || "", id, family];
  if (!words) return places;
  if (!byId("whole").checked) return places.filter((at) => holds(short(page.entries[at])));
  const kept = [];
  for (const [step, at] of places.entries()) {
    if (step % page.chunk === 0) byId("count").textContent = `searching, ${number(step)} of ${number(places.length)}`;
    if (holds(short(page.entries[at])) || holds(textsOf(await recordAt(at)))) kept.push(at);
    if (turn !== searching) return undefined;
  }
  return kept;
}

async function refresh() {
  const turn = (searching += 1);
  const places = await search(chosenOnes(), byId("query").value.trim().toLowerCase(), turn);
  if (places === undefined || turn !== searching) return;
  if (chosen.sort) {
    const [way, key] = [chosen.sort.startsWith("+") ? 1 : -1, chosen.sort.slice(1)];
    const value = (at) => page.entries[at].numbers[key] ?? 0;
    places.sort((a, b) => way * (value(a) - value(b)) || a - b);
  }
  found = places;
  list.replaceChildren();
  addRows(STEP);
  const all = plural(page.entries.length, page.noun[1]);
  byId("count").textContent = found.length === page.entries.length ? all : `${number(found.length)} of ${all}`;
  if (found.length) select(current);
  else list.append(el("li", { class: "none" }, page.entries.length ? "Nothing fits." : "Nothing was kept."));
}

function addRows(count) {
  const from = list.children.length;
  list.append(...found.slice(from, from + count).map(row));
}

function row(at) {
  const { id, question, answer, family, numbers, flags } = page.entries[at];
  const figures = page.shown.map((key) => plural(numbers[key], page.numbers[key]));
  if (numbers.copies > 1) figures.push(`${numbers.copies} copies`);
  if (numbers.score !== undefined) figures.push(`score ${number(numbers.score)}`);
  const differing = flags.filter((name) => !everywhere.has(name) && name !== "copies");
  return el("li", {}, el("a", { href: linkTo(id), "data-at": at },
    el("span", { class: "question", dir: "auto" }, question),
    el("span", { class: "answer", dir: "auto" }, answer ?? "no answer"),
    el("small", {}, [family, ...figures].filter(Boolean).join(" \u00b7 ")),
    differing.length ? el("span", { class: "flags" }, differing.map((name) => flag(name))) : null));
}

function select(at) {
  list.querySelector("[aria-current]")?.removeAttribute("aria-current");
  current = at;
  const place = found.indexOf(at);
  if (place >= list.children.length) addRows(place + STEP - list.children.length);
  const link = list.querySelector(`[data-at="${at}"]`);
  link?.setAttribute("aria-current", "true");
  link?.scrollIntoView({ block: "nearest" });
}

function move(by) {
  const next = found[current < 0 ? 0 : found.indexOf(current) + by];
  if (next === undefined) return;
  current = next; // at once: the next key may come before the record is drawn
  location.hash = linkTo(page.entries[next].id);
}

// -- summary and what was dropped -------------------------------------------------------------

function chart({ title, unit, filters, note, rows }) {
  const top = Math.max(...rows.map(([, value]) => value));
  const lines = rows.map(([label, value, about]) => {
    const bar = el("span", { class: "bar" });
    bar.style.setProperty("--share", top ? value / top : 0);
    const name = filters ? el("button", { type: "button", class: "link" }, label || "(none)") : label;
    if (filters) name.addEventListener("click", () => filterBy(filters, label));
    return el("tr", {}, el("th", { scope: "row", dir: "auto" }, name, about ? el("small", {}, about) : null),
      el("td", { class: "value" }, number(value)), el("td", { class: "bars" }, value ? bar : null));
  });
  return el("section", { class: "chart" }, note ? el("p", { class: "note" }, note) : null,
    el("table", {}, el("caption", {}, title, el("small", {}, unit)), el("tbody", {}, lines)));
}

function filterBy(key, value) {
  const box = [...byId("flags").querySelectorAll("input")].find((each) => key === "flag" && each.value === value);
  const menu = byId(`by-${key}`);
  if (box && !box.checked) box.click();
  if (menu) { menu.value = chosen[key] = value; refresh(); }
  if (narrow()) location.hash = "#:list";
}

function summary() {
  const keys = [["j k", "next, previous"], ["/", "search"], ["o", "unfold"], ["Esc", "summary"]];
  if (page.kind === "chains") keys.splice(2, 0, ["m", "what is trained"]);
  return [el("h2", { class: "hidden" }, "Summary"), page.notes.map(notice),
    el("dl", { class: "figures" }, page.figures.map(pair)),
    el("div", { class: "charts" }, page.charts.filter((each) => each.rows.length).map(chart)),
    el("p", { class: "keys" }, keys.map(([key, what]) => el("span", {}, el("kbd", {}, key), what)))];
}

function dropped() {
  const query = el("input", { type: "search", "aria-label": "Search", placeholder: "Search stage, reason, task" });
  const names = ["task", "what", "stage", "reason", "detail"];
  const linked = (task) => (placeOf.has(task) ? el("a", { href: linkTo(task) }, task) : task);
  const used = [1, 2, 3, 4].filter((at) => page.dropped.some((cells) => cells[at]));
  const [body, count] = [el("div"), el("output", { "aria-live": "polite" })];
  const draw = () => {
    const words = query.value.trim().toLowerCase();
    const fits = page.dropped.filter((cells) => cells.some((text) => text.toLowerCase().includes(words)));
    const rows = fits.slice(0, MOST).map((cells) => [...used.map((at) => cells[at]), linked(cells[0])]);
    body.replaceChildren(table("dropped", [...used.map((at) => names[at]), "task"], rows));
    count.textContent = (fits.length > MOST ? `the first ${number(MOST)} of ` : "") + number(fits.length);
  };
  query.addEventListener("input", draw);
  draw();
  return [el("h2", {}, byId("to-dropped").firstChild.data), el("div", { class: "tools" }, query, count), body];
}

// -- which view -----------------------------------------------------------------------------

function button(text, key, act, pressed) {
  const node = el("button", { type: "button", "aria-pressed": pressed }, text, el("kbd", {}, key));
  node.addEventListener("click", act);
  return node;
}

async function detail(at) {
  const entry = page.entries[at];
  const record = await recordAt(at);
  const [chains, whole] = [page.kind === "chains", shape.masked && page.kind === "chains"];
  const facts = [["set", entry.set], ["family", entry.family], ...record.facts].filter(([, value]) => value);
  return [el("div", { class: "tools" }, button("Previous", "k", () => move(-1)), button("Next", "j", () => move(1)),
    chains ? button("What is trained", "m", () => toggle("masked"), `${shape.masked}`) : null,
    whole ? null : button("Unfold", "o", () => toggle("unfolded"), `${shape.unfolded}`)),
  el("h2", { dir: "auto", class: entry.question.length > 2 * FOLD && "long" }, entry.question),
  el("p", { class: "outcome" }, el("span", {}, "Answer"), el("b", { dir: "auto" }, entry.answer ?? "none"),
    entry.flags.map((name) => flag(name, page.flags[name]))),
  el("dl", { class: "facts" }, facts.map(pair)),
  chains ? (whole ? maskedChain(record, entry) : readChain(record)) : readEpisode(record)];
}

function toggle(what) {
  shape[what] = !shape[what];
  if (current >= 0) route(true);
}

async function route(stay) {
  const turn = (drawing += 1);
  const hash = location.hash.slice(1);
  let name = hash;
  try { name = decodeURIComponent(hash); } catch { /* not one of our links */ }
  const at = hash.startsWith(":") ? undefined : placeOf.get(name);
  const view = at !== undefined ? "detail" : { ":dropped": "dropped", ":list": "list" }[hash] || "summary";
  let content;
  try {
    content = view === "detail" ? await detail(at) : view === "dropped" ? dropped() : summary();
  } catch (error) {
    content = [notice(`This browser cannot show the record: ${error.message}`)];
  }
  if (turn !== drawing) return;
  const missing = hash && view === "summary" && hash !== ":summary";
  const warning = missing ? [notice(`There is no ${page.noun[0]} ${name} on this page.`)] : [];
  document.body.dataset.view = view;
  for (const link of document.querySelectorAll("nav a")) {
    link.setAttribute("aria-current", link.hash === `#:${view}` ? "page" : "false");
  }
  const scrolled = [main.scrollTop, window.scrollY];
  main.replaceChildren(...[...warning, ...content].flat(2).filter(Boolean));
  main.scrollTop = stay === true ? scrolled[0] : 0;
  if (narrow()) window.scrollTo(0, stay === true ? scrolled[1] : 0);
  select(at === undefined ? -1 : at);
}

const KEYS = {
  j: () => move(1), ArrowRight: () => move(1), k: () => move(-1), ArrowLeft: () => move(-1),
  m: () => toggle("masked"), o: () => toggle("unfolded"), "/": () => byId("query").focus(),
  Escape: () => { location.hash = "#:summary"; },
};

document.addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT)$/.test(event.target.tagName) && event.target.type !== "checkbox";
  if (typing && event.key === "Escape") event.target.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(KEYS, event.key)) return;
  event.preventDefault();
  KEYS[event.key]();
});
window.addEventListener("hashchange", route);
document.addEventListener("scroll", () => { // of the list or, on a narrow screen, of the page
  if (list.checkVisibility() && list.getBoundingClientRect().bottom < innerHeight + 900) addRows(STEP);
}, { capture: true, passive: true });
byId("to-dropped").hidden = !page.dropped.length;
buildFilters();
refresh();
route();
