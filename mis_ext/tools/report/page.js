// SPDX-License-Identifier: Apache-2.0
// A button in the title of each column sorts its table: the largest first, then the smallest. What was not measured is last.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0], titles = [...table.tHead.rows[0].cells];
  const value = (row, column) => {
    const text = row.cells[column].textContent, number = parseFloat(text.replace(/^x /, "").replaceAll(",", ""));
    return text === "inf" ? Infinity : Number.isNaN(number) ? text : number;
  };
  titles.forEach((title, column) => {
    const button = document.createElement("button");
    button.append(...title.childNodes);
    title.append(button);
    button.onclick = () => {
      const order = title.ariaSort === "descending" ? "ascending" : "descending", sign = order === "ascending" ? 1 : -1;
      titles.forEach((each) => each.removeAttribute("aria-sort"));
      title.ariaSort = order;
      const rows = [...body.rows].map((row) => [value(row, column), row]);
      rows.sort(([a], [b]) => (a === "-") - (b === "-") || sign * (
        typeof a === "number" && typeof b === "number" ? a - b || 0 : String(a).localeCompare(String(b))));
      body.append(...rows.map(([, row]) => row));
    };
  });
}
