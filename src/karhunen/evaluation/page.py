"""The page's style and its few lines of script; both stand inside the page, which asks nothing of a network."""

CSS = """
body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#111;background:#fff}
h1,h2{line-height:1.2}section{margin-top:2.5rem}.note{color:#555;font-size:.85rem}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:.2rem .6rem;border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}
.sortable th{cursor:pointer}th[aria-sort=ascending]::after{content:" ↑"}th[aria-sort=descending]::after{content:" ↓"}
tbody tr:nth-child(even){background:#f6f6f6}figure{margin:1.2rem 0}img{max-width:100%}
section:last-of-type td{white-space:normal;text-align:left}
figcaption{color:#555;font-size:.85rem}
@media print{body{max-width:none;margin:0;font-size:10pt}figure,tr{break-inside:avoid}h2{break-after:avoid}}
"""

SCRIPT = """
for (const table of document.querySelectorAll('table.sortable')) {
  [...table.tHead.rows[0].cells].forEach((head, i) => head.addEventListener('click', () => {
    const up = head.getAttribute('aria-sort') !== 'ascending';
    for (const other of table.tHead.rows[0].cells) other.removeAttribute('aria-sort');
    head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
    const key = row => { const t = row.cells[i].textContent, x = parseFloat(t); return isNaN(x) ? t : x; };
    const sign = up ? 1 : -1;
    const rows = [...table.tBodies[0].rows].sort((a, b) => {
      const x = key(a), y = key(b);
      return sign * (typeof x === 'number' && typeof y === 'number' ? x - y : String(x).localeCompare(String(y)));
    });
    table.tBodies[0].append(...rows);
  }));
}
"""
