"use strict";
// A click on a column's head sorts the rows by it, once more the other way round; entries without a value stay last.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const value = (row) => row.cells[column].dataset.value;
      const compare = (left, right) => {
        const [a, b] = [value(left), value(right)];
        if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
        const order = head.classList.contains("number") ? Number(a) - Number(b) : a.localeCompare(b);
        return descending ? -order : order;
      };
      const body = table.tBodies[0];
      body.append(...[...body.rows].sort(compare));
    });
  });
}
