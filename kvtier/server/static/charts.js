// Plain SVG charts. Each can be read without seeing it: a summary as its label, a table of its numbers, and a cursor
// that the arrow keys move. No inline styles: the page's content security policy forbids them.

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 66, RIGHT = 8, TOP = 8, BOTTOM = 24, HEIGHT = 200, KINDS = 6;

export function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

export function table(caption, head, rows) {
  const cell = (value, i) => (i === 0 ? element("th", { scope: "row" }, value) : element("td", {}, value));
  return element("table", {},
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...head.map((h) => element("th", { scope: "col" }, h)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map(cell)))));
}

// A share from 0 to 1 as a bar; what it says stands beside it as text.
export function bar(share, kind = 0) {
  const width = Math.round(1000 * Math.min(1, Math.max(0, share || 0))) / 10;
  return svg("svg", { class: "bar", "aria-hidden": "true", preserveAspectRatio: "none", viewBox: "0 0 100 10" },
    svg("rect", { class: "bar-back", width: 100, height: 10 }),
    svg("rect", { class: `f${kind % KINDS}`, width, height: 10 }));
}

function niceMaximum(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].find((step) => step * power >= value) * power;
}

// The parts of a figure that stay: where the focus is and which table is open survive a refresh.
function partsOf(figure) {
  if (!figure.chart) {
    const plot = element("div", { class: "plot", tabindex: "0", role: "img" });
    const readout = element("output", { class: "readout" });
    const legend = element("ul", { class: "legend" });
    const rows = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of the chart" });
    figure.replaceChildren(plot, readout, legend, element("details", {}, element("summary", {}, "As a table"), rows));
    figure.chart = { plot, readout, legend, rows, cursor: null };
    new ResizeObserver(() => figure.chart.draw && figure.chart.draw()).observe(plot);
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step && figure.chart.move) { event.preventDefault(); figure.chart.move(step); }
    });
    plot.addEventListener("pointermove", (event) => figure.chart.point && figure.chart.point(event.offsetX));
    plot.addEventListener("pointerleave", () => figure.chart.leave && figure.chart.leave());
  }
  return figure.chart;
}

function swatch(i, stacked) {
  const mark = stacked ? svg("rect", { class: `f${i % KINDS}`, width: 24, height: 12 })
    : svg("path", { class: `s${i % KINDS}`, d: "M0 6H24" });
  return svg("svg", { "aria-hidden": "true", viewBox: "0 0 24 12" }, mark);
}

// lines: [{name, values}], one value or null per x. Stacked: columns on top of each other; else lines.
// xs: numbers; xText, yText: how a value is written, tickText: in short, below the axis; summary: the chart in one sentence.
export function chart(figure, { xs, lines, xText, yText, xName, summary, tickText = xText, stacked = false, maximum = null }) {
  const parts = partsOf(figure);
  parts.plot.setAttribute("aria-label", `${summary} Left and right arrow keys read single values.`);
  parts.legend.replaceChildren(...lines.map((line, i) => element("li", {}, swatch(i, stacked), line.name)));
  parts.rows.replaceChildren(table(summary, [xName, ...lines.map((line) => line.name)],
    xs.map((x, at) => [xText(x), ...lines.map((line) => (line.values[at] === null ? "–" : yText(line.values[at])))])));

  const sums = xs.map((_, at) => lines.reduce((sum, line) => sum + (line.values[at] || 0), 0));
  const peak = stacked ? Math.max(0, ...sums) : Math.max(0, ...lines.flatMap((line) => line.values.map((v) => v || 0)));
  const top = maximum ?? niceMaximum(peak);

  parts.draw = () => {
    const width = Math.max(200, parts.plot.clientWidth);
    const inner = width - LEFT - RIGHT, tall = HEIGHT - TOP - BOTTOM;
    const column = inner / Math.max(1, xs.length);
    const atX = (at) => (stacked ? LEFT + (at + 0.5) * column : LEFT + (xs.length < 2 ? inner / 2 : (at * inner) / (xs.length - 1)));
    const atY = (value) => TOP + tall * (1 - Math.min(1, value / top));
    const root = svg("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, "aria-hidden": "true" });
    for (const part of [0, 0.5, 1]) {
      const y = atY(part * top);
      root.append(svg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }),
        svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, yText(part * top)));
    }
    const every = Math.max(1, Math.ceil(xs.length / Math.max(1, Math.floor(inner / 64))));
    for (let at = 0; at < xs.length; at += every) {
      const x = Math.min(atX(at), width - 24);
      root.append(svg("text", { x, y: HEIGHT - 6, "text-anchor": "middle" }, tickText(xs[at])));
    }
    if (stacked) {
      xs.forEach((_, at) => {
        let below = 0;
        lines.forEach((line, i) => {
          const value = line.values[at] || 0;
          if (value > 0) {
            root.append(svg("rect", { class: `f${i % KINDS}`, x: LEFT + at * column, width: Math.max(1, column - 0.5),
              y: atY(below + value), height: Math.max(0, atY(below) - atY(below + value)) }));
          }
          below += value;
        });
      });
    } else {
      lines.forEach((line, i) => {
        let path = "", open = false;
        line.values.forEach((value, at) => {
          if (value === null) { open = false; return; }
          path += `${open ? "L" : "M"}${atX(at).toFixed(1)} ${atY(value).toFixed(1)}`;
          open = true;
        });
        root.append(svg("path", { class: `s${i % KINDS}`, d: path || "M0 0" }));
      });
    }
    const cursor = svg("line", { class: "cursor", y1: TOP, y2: TOP + tall, visibility: "hidden" });
    root.append(cursor);
    const show = () => {
      if (parts.cursor === null || parts.cursor >= xs.length) { parts.readout.textContent = ""; return; }
      cursor.setAttribute("x1", atX(parts.cursor));
      cursor.setAttribute("x2", atX(parts.cursor));
      cursor.setAttribute("visibility", "visible");
      const said = lines.map((line) => `${line.name} ${line.values[parts.cursor] === null ? "–" : yText(line.values[parts.cursor])}`);
      parts.readout.textContent = `${xText(xs[parts.cursor])}: ${said.join(", ")}`;
    };
    parts.move = (step) => {
      parts.cursor = Math.max(0, Math.min(xs.length - 1, parts.cursor === null ? xs.length - 1 : parts.cursor + step));
      show();
    };
    parts.point = (x) => {
      parts.cursor = Math.max(0, Math.min(xs.length - 1, stacked ? Math.floor((x - LEFT) / column)
        : Math.round(((x - LEFT) / inner) * (xs.length - 1))));
      show();
    };
    parts.leave = () => { parts.cursor = null; cursor.setAttribute("visibility", "hidden"); parts.readout.textContent = ""; };
    parts.plot.replaceChildren(root);
    if (parts.cursor !== null) show();
  };
  parts.draw();
}

// Nothing to draw yet: say why.
export function nothing(figure, text) {
  delete figure.chart;
  figure.replaceChildren(element("p", { class: "note" }, text));
}
