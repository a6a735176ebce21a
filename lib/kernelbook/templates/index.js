// Sorts and filters the claims. Without it the table stands whole, in the order of the articles.
"use strict";
const table = document.querySelector("table.claims");
const controls = document.querySelector(".controls");
const body = table.tBodies[0];
const inOrder = [...body.rows];
const claims = inOrder.filter((row) => !row.classList.contains("article"));
const headings = inOrder.filter((row) => row.classList.contains("article"));
let sorted = { column: 0, down: false };

function value(row) {
  const cell = row.cells[sorted.column];
  return "order" in cell.dataset ? Number(cell.dataset.order) : cell.textContent.trim();
}

function compare(a, b) {
  const [x, y] = [value(a), value(b)];
  if (x === "" || y === "") return (x === "") - (y === ""); // what has no figure stays at the end
  const order = typeof x === "number" ? x - y : x.localeCompare(y, "en", { numeric: true });
  return sorted.down ? -order : order;
}

// Articles head their claims as long as these stand in the articles' order.
function show() {
  const whole = sorted.column === 0 && !sorted.down;
  const article = controls.elements.article.value, verdict = controls.elements.verdict.value;
  body.append(...(whole ? inOrder : [...headings, ...[...claims].sort(compare)]));
  for (const row of claims) {
    row.hidden = (article && row.dataset.article !== article)
      || (verdict && !row.dataset.verdicts.split("|").includes(verdict));
  }
  const shown = claims.filter((row) => !row.hidden);
  for (const row of headings) {
    row.hidden = !whole || !shown.some((claim) => claim.dataset.article === row.dataset.article);
  }
  controls.querySelector("output").textContent = `${shown.length} of ${claims.length} claims`;
}

[...table.tHead.rows[0].cells].forEach((cell, column) => {
  const button = document.createElement("button");
  button.type = "button";
  button.append(cell.firstChild); // the name; where the records lie stays beside it
  button.addEventListener("click", () => {
    sorted = { column, down: sorted.column === column && !sorted.down };
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    cell.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
    show();
  });
  cell.prepend(button);
});
controls.addEventListener("change", show);
controls.addEventListener("submit", (event) => event.preventDefault());
controls.hidden = false;
show();
// A link to a claim must find it, whatever the filters hide.
addEventListener("hashchange", () => {
  if (claims.some((row) => row.hidden && `#${row.id}` === location.hash)) {
    controls.reset();
    show();
    document.getElementById(location.hash.slice(1)).scrollIntoView();
  }
});
