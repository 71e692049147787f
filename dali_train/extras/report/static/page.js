// Draws the charts of a report from the JSON in its page, and keeps a page current that `dali-train report --serve`
// has handed out. No markup is made from data: names go through textContent and canvas.
"use strict";
(() => {
  // Okabe and Ito's palette, which colour-blind readers can distinguish too: https://jfly.uni-koeln.de/color/
  const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"];
  const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [1, 5], [12, 4]];
  const HEIGHT = 230;
  const xChoice = document.getElementById("x"), smoothing = document.getElementById("smoothing");
  const read = (page) => JSON.parse(page.getElementById("data").textContent);
  let data = read(document);

  const short = (v) => {
    if (v == null) return "";
    const size = Math.abs(v);
    if (size && (size < 1e-4 || size >= 1e6)) return (+v.toPrecision(4)).toExponential().replace("e+", "e");
    return (+v.toPrecision(6)).toLocaleString("en", { maximumFractionDigits: 7 });
  };
  const percent = (v, digits) => (v == null ? "" : `${(100 * v).toFixed(digits)} %`);
  const isWhole = (v) => Math.abs(v - Math.round(v)) < 1e-6;
  const digitsOf = (increment) => [0, 1, 2, 3].find((digits) => isWhole(100 * increment * 10 ** digits)) ?? 4;

  // A column without the lines that lack it; null where it was not finite. Training curves are smoothed as in
  // TensorBoard: a moving average without the bias towards its start.
  function points(columns, field, smooth, log) {
    const xs = [], ys = [];
    let mean = 0, weight = 0;
    columns.y[field].forEach((y, i) => {
      if (y === null) return;
      const drawn = typeof y === "number" && (!log || y > 0);
      if (drawn) {
        mean = smooth * mean + (1 - smooth) * y;
        weight = smooth * weight + (1 - smooth);
      }
      xs.push(columns.x[xChoice.value][i]);
      ys.push(drawn ? mean / weight : null);
    });
    return [xs, ys];
  }

  function curves(chart, log) {
    const several = data.runs.length > 1, drawn = [];
    chart.fields.forEach(([kind, field, name], index) => data.runs.forEach((run, number) => {
      if (!run[kind].y[field]) return;
      const label = !several ? name : chart.fields.length > 1 ? `${run.name}: ${name}` : run.name;
      const smooth = kind === "train" ? +smoothing.value : 0;
      drawn.push({ label, colour: COLOURS[(several ? number : index) % COLOURS.length],
        dash: several ? DASHES[index % DASHES.length] : [], table: points(run[kind], field, smooth, log) });
    }));
    return drawn;
  }

  // The legend shows the last value at or before the cursor: each curve has its own points.
  function lastValue(plot, series, index) {
    const ys = plot.data[series];
    for (let i = index; i >= 0; i--) if (ys[i] != null) return i;
    return index;
  }

  // Without a cursor: the end of the curve.
  const shown = (format) => (plot, v, series, index) => {
    const value = index == null && series ? plot.data[series].findLast((y) => y != null) : v;
    return value == null ? "–" : format(value);
  };

  function line(plot, colour, x0, y0, x1, y1) {
    const context = plot.ctx;
    context.save();
    context.strokeStyle = colour;
    context.setLineDash([2, 4]);
    context.beginPath();
    context.moveTo(x0, y0);
    context.lineTo(x1, y1);
    context.stroke();
    context.restore();
  }

  function marks(plot, chart) {
    const { left, top, width, height } = plot.bbox, { x, y } = plot.scales;
    data.runs.forEach((run, number) => run.resumed.x[xChoice.value].forEach((at) => {
      const pixel = plot.valToPos(at, "x", true);
      if (at >= x.min && at <= x.max) line(plot, COLOURS[number % COLOURS.length], pixel, top, pixel, top + height);
    }));
    if (chart.mark !== null && chart.mark >= y.min && chart.mark <= y.max) {
      const pixel = plot.valToPos(chart.mark, "y", true);
      line(plot, "#555", left, pixel, left + width, pixel);
    }
  }

  function yRange(chart, log, low, high) {
    if (low == null) return [log ? 0.1 : 0, 1];
    if (log) return uPlot.rangeLog(low, high, 10, false);
    if (chart.from_zero && low >= 0) return [0, high > 0 ? 1.08 * high : 1];
    const [bottom, top] = uPlot.rangeNum(low, high, 0.08, true);
    return chart.percent ? [Math.max(0, bottom), Math.min(1, top)] : [bottom, top];
  }

  class Drawing {
    constructor(figure, number) {
      this.number = number;
      this.box = figure.appendChild(document.createElement("div"));
      this.log = figure.querySelector("input");
      this.log.checked = data.charts[number].log;
      this.log.addEventListener("change", () => this.draw());
      if (data.charts[number].fields.some(([kind, field]) => kind === "train" && field === "loss")) {
        this.command = figure.appendChild(document.createElement("pre"));
        this.command.textContent = "A click here shows the command for the images of a step.";
      }
      // Folded parts have no width until they are opened.
      new ResizeObserver(() => this.box.clientWidth && (this.plot ? this.resize() : this.draw())).observe(this.box);
    }

    // Of each run, for the logged step that is nearest to the cursor.
    showCommands() {
      const at = this.plot.posToVal(this.plot.cursor.left, "x"), lines = [];
      for (const { blame, train } of data.runs) {
        const distances = train.x[xChoice.value].map((x) => Math.abs(x - at));
        const step = train.x.step[distances.indexOf(Math.min(...distances))];
        if (step !== undefined) lines.push(`${blame} --step ${step}`);
      }
      this.command.textContent = lines.join("\n");
    }

    resize() {
      this.plot.setSize({ width: this.box.clientWidth, height: HEIGHT });
    }

    draw(keepsZoom = false) {
      const old = this.plot, width = this.box.clientWidth;
      if (!width) return;
      const chart = data.charts[this.number], log = this.log.checked, lines = curves(chart, log);
      const hidden = new Set(old ? old.series.filter((series) => !series.show).map((series) => series.label) : []);
      const grid = { stroke: "#e6e6e6", width: 1 }, ticks = { show: false };
      const axis = { stroke: "#555", grid, ticks, font: "12px system-ui, sans-serif" };
      const text = (v, digits) => (chart.percent ? percent(v, digits) : short(v));
      const yTexts = (plot, splits, axis, space, increment) =>
        splits.map((v) => text(v, log ? 1 : digitsOf(increment)));
      const unit = xChoice.value === "time" ? data.time_unit : "";
      const plot = new uPlot({
        width, height: HEIGHT,
        cursor: { sync: { key: "charts" }, dataIdx: lastValue, points: { size: 6 } },
        scales: {
          x: { time: false },
          y: { distr: log ? 3 : 1, range: (_, low, high) => yRange(chart, log, low, high) },
        },
        axes: [{ ...axis, size: 28, values: (_, splits) => splits.map(short) }, { ...axis, size: 62, values: yTexts }],
        series: [
          { label: xChoice.value, value: shown((v) => `${short(v)} ${unit}`) },
          ...lines.map((curve) => ({
            label: curve.label, stroke: curve.colour, dash: curve.dash, width: 1.6, show: !hidden.has(curve.label),
            points: { show: curve.table[0].length <= 40, size: 5 },
            value: shown((v) => text(v, 2)),
          })),
        ],
        hooks: { draw: [(drawn) => marks(drawn, chart)] },
      }, lines.length ? uPlot.join(lines.map((curve) => curve.table)) : [[]], this.box);
      if (old) {
        const { min, max } = old.scales.x, xs = old.data[0];
        if (keepsZoom && (min > xs[0] || max < xs[xs.length - 1])) plot.setScale("x", { min, max });
        old.destroy();
      }
      this.plot = plot;
      if (this.command) plot.over.addEventListener("click", () => this.showCommands());
    }
  }

  const drawings = [...document.querySelectorAll(".chart")].map((figure, number) => new Drawing(figure, number));
  const drawAll = (keepsZoom) => drawings.forEach((drawing) => drawing.draw(keepsZoom));
  for (const control of [xChoice, smoothing]) control?.addEventListener("input", () => drawAll(false));

  // A page that is served asks for itself again. Parts marked data-live are exchanged, what is opened, ticked or
  // zoomed stays.
  async function refresh() {
    const answer = await fetch(location.href, { cache: "no-cache" });
    if (!answer.ok) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const names = (where) => [...where.querySelectorAll("[data-live]")].map((part) => part.id).join();
    if (names(page) !== names(document) || page.querySelectorAll(".chart").length !== drawings.length) {
      location.reload();
      return;
    }
    for (const part of document.querySelectorAll("[data-live]")) {
      const ticked = new Set([...part.querySelectorAll(":checked")].map((box) => box.value));
      const fresh = document.adoptNode(page.getElementById(part.id));
      fresh.querySelectorAll("input[type=checkbox]").forEach((box) => (box.checked = ticked.has(box.value)));
      part.replaceWith(fresh);
    }
    const before = JSON.stringify(data);
    data = read(page);
    if (JSON.stringify(data) !== before) drawAll(true);
  }
  const seconds = +document.body.dataset.refresh;
  if (seconds) setInterval(() => refresh().catch(() => {}), 1000 * seconds); // the server may be gone for a while
})();
