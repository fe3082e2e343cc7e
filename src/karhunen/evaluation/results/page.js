// Tables that sort, and a picture of error against rate whose points know their rows. It asks nothing of a network.
'use strict';

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

const NS = Object.assign(document.createElement('div'), {innerHTML: '<svg></svg>'}).firstChild.namespaceURI;
const AT_FIRST = 10, SIZE = 5;
const CORNERS = {
  s: [[-1, -1], [1, -1], [1, 1], [-1, 1]], '^': [[0, -1.2], [1.1, 0.9], [-1.1, 0.9]], v: [[0, 1.2], [1.1, -0.9], [-1.1, -0.9]],
  '<': [[-1.2, 0], [0.9, -1.1], [0.9, 1.1]], '>': [[1.2, 0], [-0.9, -1.1], [-0.9, 1.1]], D: [[0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]],
  d: [[0, -1.4], [0.8, 0], [0, 1.4], [-0.8, 0]], h: round(6, 1, 1), H: round(6, 1, 1, 0.5), p: round(5, 1, 1), '*': round(5, 1.7, 0.7),
  P: cross(0), X: cross(1), o: round(16, 1, 1),
};

function round(n, far, near, turn = 0) {
  const corners = far === near ? n : 2 * n;
  return [...Array(corners).keys()].map(i => {
    const a = (i + turn) * 2 * Math.PI / corners - Math.PI / 2, r = i % 2 ? near : far;
    return [r * Math.cos(a), r * Math.sin(a)];
  });
}

function cross(diagonal) {
  const t = 0.4, l = 1.2, c = Math.SQRT1_2;
  const plus = [[-t, -l], [t, -l], [t, -t], [l, -t], [l, t], [t, t], [t, l], [-t, l], [-t, t], [-l, t], [-l, -t], [-t, -t]];
  return diagonal ? plus.map(([x, y]) => [c * (x - y), c * (x + y)]) : plus;
}

function element(parent, name, attributes, text) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

const marker = (parent, look, x, y, size, more = {}) => element(parent, 'polygon', {
  points: CORNERS[look.marker].map(([a, b]) => `${x + a * size},${y + b * size}`).join(' '), fill: look.color, class: 'mark', ...more,
});

const tip = document.createElement('div');
tip.className = 'tip';
tip.hidden = true;
document.body.append(tip);

for (const chart of document.querySelectorAll('.chart')) {
  const data = JSON.parse(chart.querySelector('script').textContent);
  const rows = data.rows.filter(row => row.kl > 0), table = chart.parentNode.querySelector('table.sortable');
  const lines = new Map([...table.tBodies[0].rows].map(line => [line.dataset.row, line]));
  const methods = [...new Set(rows.map(row => row.recipe))];
  const near = name => Math.min(9, ...rows.filter(r => r.recipe === name && r.bits > 1.3 && r.bits < 3).map(r => r.kl));
  const best = methods.sort((a, b) => (b === data.ours) - (a === data.ours) || near(a) - near(b));  // least KL near two bits first
  let shown = new Set(best.slice(0, AT_FIRST)), measure = 'kl';

  const choice = document.createElement('div');
  choice.className = 'choice';
  const picture = document.createElementNS(NS, 'svg');
  chart.append(picture, choice);

  const button = (words, act) => {
    const made = document.createElement('button');
    made.textContent = words;
    made.addEventListener('click', () => { act(); tick(); draw(); });
    choice.append(made);
  };
  button(`ten of ${best.length}`, () => { shown = new Set(best.slice(0, AT_FIRST)); });
  button('all', () => { shown = new Set(best); });
  button('none', () => { shown = new Set(); });
  button('KL or changed tokens', () => { measure = measure === 'kl' ? 'changed' : 'kl'; });
  const boxes = new Map(best.map(name => {
    const label = document.createElement('label'), box = document.createElement('input');
    box.type = 'checkbox';
    box.addEventListener('change', () => { box.checked ? shown.add(name) : shown.delete(name); draw(); });
    const swatch = element(label, 'svg', {viewBox: '0 0 16 16'});
    marker(swatch, data.looks[name], 8, 8, 5);
    label.prepend(box, ' ');
    label.append(' ' + name);
    choice.append(label);
    return [name, box];
  }));
  const tick = () => boxes.forEach((box, name) => { box.checked = shown.has(name); });

  function light(row, on, x, y) {
    const line = lines.get(row.id);
    if (line) line.classList.toggle('lit', on);
    for (const drawn of picture.querySelectorAll('[data-recipe]')) {
      drawn.classList.toggle('dim', on && drawn.dataset.recipe !== row.recipe);
    }
    tip.hidden = !on;
    if (!on) return;
    tip.replaceChildren(...row.says.map((words, i) => Object.assign(document.createElement(i ? 'div' : 'b'), {textContent: words})));
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${y + 14 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 10 : y + 14}px`;
  }

  function draw() {
    const width = Math.max(300, chart.clientWidth), narrow = width < 560, height = narrow ? 360 : 440;
    const left = 66, right = width - (narrow ? 108 : 150), top = 14, bottom = height - 42;
    picture.replaceChildren();
    picture.setAttribute('viewBox', `0 0 ${width} ${height}`);
    picture.style.height = `${height}px`;
    const mine = rows.filter(row => shown.has(row.recipe) && row[measure] > 0);
    const of = (list, key) => [Math.min(...list.map(key)), Math.max(...list.map(key))];
    const [x0, x1] = of(rows, r => r.bits), [y0, y1] = of(mine.length ? mine : rows, r => Math.max(r[measure] || 1e-6, 1e-6));
    const scale = (low, high, from, to) => value =>
      from + (to - from) * (Math.log(value) - Math.log(low)) / ((Math.log(high) - Math.log(low)) || 1);
    const x = scale(x0 / 1.06, x1 * 1.06, left, right), y = scale(y0 / 1.3, y1 * 1.3, bottom, top);
    for (const bits of [0.5, 1, 1.5, 2, 3, 4, 6, 8, 12].filter(b => b >= x0 / 1.06 && b <= x1 * 1.06)) {
      element(picture, 'line', {x1: x(bits), x2: x(bits), y1: top, y2: bottom, class: 'grid'});
      element(picture, 'text', {x: x(bits), y: bottom + 15, 'text-anchor': 'middle'}, bits);
    }
    const decades = [];
    for (let p = Math.floor(Math.log10(y0 / 1.3)); p <= Math.log10(y1 * 1.3); p++) decades.push(...[1, 3].map(m => m * 10 ** p));
    for (const at of decades.filter(v => v >= y0 / 1.3 && v <= y1 * 1.3)) {
      element(picture, 'line', {x1: left, x2: right, y1: y(at), y2: y(at), class: 'grid'});
      element(picture, 'text', {x: left - 6, y: y(at) + 4, 'text-anchor': 'end'}, Number(at.toPrecision(1)));
    }
    const words = measure === 'kl' ? 'KL to the uncompressed model, nats' : 'share of next tokens that changed';
    element(picture, 'text', {x: (left + right) / 2, y: height - 8, 'text-anchor': 'middle'}, 'bits per element, all metadata included');
    element(picture, 'text', {transform: `translate(12 ${(top + bottom) / 2}) rotate(-90)`, 'text-anchor': 'middle'}, words);
    const ends = [];
    for (const name of best.filter(n => shown.has(n)).reverse()) {
      const look = data.looks[name], points = mine.filter(r => r.recipe === name).sort((a, b) => a.bits - b.bits);
      if (!points.length) continue;
      element(picture, 'polyline', {
        points: points.map(r => `${x(r.bits)},${y(r[measure])}`).join(' '), fill: 'none', stroke: look.color, class: 'mark',
        'stroke-width': name === data.ours ? 2.5 : 1.2, 'stroke-dasharray': look.dashed ? '5 3' : '', 'data-recipe': name,
      });
      for (const row of points) {
        const bar = (row.bars[measure] || []).map(end => Math.max(end, y0 / 1.3));
        if (bar.length) {
          element(picture, 'line', {x1: x(row.bits), x2: x(row.bits), y1: y(bar[0]), y2: y(Math.min(bar[1], y1 * 1.3)),
            stroke: look.color, 'stroke-width': 0.8, class: 'mark', 'data-recipe': name});
        }
        const made = marker(picture, look, x(row.bits), y(row[measure]), SIZE, {tabindex: 0, 'data-recipe': name});
        element(made, 'title', {}, row.says.join('; '));
        made.addEventListener('pointerenter', event => light(row, true, event.clientX, event.clientY));
        made.addEventListener('pointerleave', () => light(row, false));
        made.addEventListener('focus', () => { const at = made.getBoundingClientRect(); light(row, true, at.right, at.bottom); });
        made.addEventListener('blur', () => light(row, false));
      }
      const last = points[points.length - 1];
      ends.push({name, look, x: x(last.bits), y: y(last[measure])});
    }
    ends.sort((a, b) => a.y - b.y);
    const gap = Math.min(13, (bottom - top) / Math.max(1, ends.length));
    ends.forEach((end, i) => { end.at = Math.max(end.y, i ? ends[i - 1].at + gap : top); });
    for (let i = ends.length - 1, most = bottom; i >= 0; most = ends[i--].at - gap) ends[i].at = Math.min(ends[i].at, most);
    for (const end of ends) {
      element(picture, 'line', {x1: end.x, y1: end.y, x2: right + 8, y2: end.at, stroke: end.look.color, 'stroke-width': 0.5,
        class: 'mark', 'data-recipe': end.name});
      marker(picture, end.look, right + 14, end.at, 4, {'data-recipe': end.name});
      element(picture, 'text', {x: right + 22, y: end.at + 4, 'data-recipe': end.name}, end.name);
    }
  }

  for (const row of rows) {
    const line = lines.get(row.id);
    line?.addEventListener('pointerenter', () => picture.querySelectorAll('[data-recipe]').forEach(
      drawn => drawn.classList.toggle('dim', shown.has(row.recipe) && drawn.dataset.recipe !== row.recipe)));
    line?.addEventListener('pointerleave', () => picture.querySelectorAll('.dim').forEach(drawn => drawn.classList.remove('dim')));
  }
  tick();
  draw();
  new ResizeObserver(draw).observe(chart);
}
