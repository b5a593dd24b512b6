"use strict";
// A click on a column's head sorts the rows by it, once more the other way round; entries without a value stay last.
// A row is a table body, with what stands beneath it.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const value = (body) => body.rows[0].cells[column].dataset.value;
      const compare = (left, right) => {
        const [a, b] = [value(left), value(right)];
        if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
        const order = head.classList.contains("number") ? Number(a) - Number(b) : a.localeCompare(b);
        return descending ? -order : order;
      };
      table.append(...[...table.tBodies].sort(compare));
    });
  });
}
