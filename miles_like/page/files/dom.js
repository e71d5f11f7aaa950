// Elements are made of texts (textContent): no text of a run is ever read as HTML.
const byId = (id) => document.getElementById(id);
const parsed = (id) => JSON.parse(byId(id).textContent);

function el(tag, properties, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && typeof value !== "string") made[name] = value;
    else made.setAttribute(name, value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined && child !== false) made.append(child);
  return made;
}

// rows of cells; a cell that is a number is aligned to the right
function table(head, rows, properties) {
  const numeric = head.map((_, i) => rows.some((r) => typeof r[i] === "number"));
  const cell = (tag, value, i) => el(tag, { class: numeric[i] ? "n" : "" }, typeof value === "number" ? number(value) : value);
  return el("table", {},
    el("thead", {}, el("tr", {}, head.map((h, i) => cell("th", h, i)))),
    el("tbody", {}, rows.map((r, at) => el("tr", properties ? properties(at) : {}, r.map((v, i) => cell("td", v, i))))));
}

function number(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en");
  if (size >= 1e4 && size < 1e15) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

function duration(seconds) {
  const s = Math.round(seconds), h = Math.floor(s / 3600), two = (n) => String(n).padStart(2, "0");
  const days = Math.floor(h / 24), clock = `${h % 24}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
  return days ? `${days} d ${clock}` : clock;
}

const counted = (n, noun) => `${number(n)} ${noun}${n === 1 ? "" : "s"}`;
const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
