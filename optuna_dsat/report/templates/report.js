"use strict";
const optunaDsat = (() => {
  const INK = document.documentElement.dataset.ink;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(pointer: coarse)");
  const PRINT_WIDTH = 660;  // px of an A4 page between its margins, at 96 px an inch, and some room
  const NARROW = 620;
  const MOST_TICKS = 6;
  let printing = false;

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // What must stand out is drawn in INK, which is the colour of the text here.
  const painted = (node, ink) => {
    if (node === INK) return ink;
    if (Array.isArray(node)) return node.map((one) => painted(one, ink));
    if (node && typeof node === "object")
      return Object.fromEntries(Object.entries(node).map(([key, one]) => [key, painted(one, ink)]));
    return node;
  };

  const pageColours = () =>
    printing
      ? { text: "#000", quiet: "#444", grid: "#ddd", card: "#fff", line: "#bbb" }
      : { text: colour("--text"), quiet: colour("--quiet"), grid: colour("--grid"), card: colour("--card"),
          line: colour("--line") };

  // Ticks of a logarithmic axis between two values: powers of two, or round numbers where few of these are in sight.
  const ticksBetween = (low, high) => {
    const powers = [];
    for (let power = Math.ceil(Math.log2(low)); 2 ** power <= high; power++) powers.push(2 ** power);
    if (powers.length >= 3) return powers.filter((_, place) => place % Math.ceil(powers.length / 12) === 0);
    const rough = (high - low) / MOST_TICKS;
    const decade = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((one) => one * decade).find((one) => one >= rough);
    const ticks = [];
    for (let place = Math.ceil(low / step); place * step <= high; place++)
      ticks.push(Number((place * step).toPrecision(12)));
    return ticks;
  };

  const axesOf = (layout) => Object.keys(layout).filter((name) => /^[xy]axis\d*$/.test(name));

  const retick = (div, changed) => {
    for (const name of axesOf(div.layout)) {
      const axis = div.layout[name];
      const moved = Object.keys(changed).some((key) => key.startsWith(`${name}.range`) || key.startsWith(`${name}.auto`));
      if (!moved || axis.type !== "log" || !axis.tickvals) continue;
      const [low, high] = axis.range.map((end) => 10 ** end);
      Plotly.relayout(div, { [`${name}.tickvals`]: ticksBetween(low, high) });
    }
  };

  // A figure's legend is text above it, so it wraps as text does and covers nothing.
  const SHAPES = { square: [4, 45], diamond: [4, 0], "diamond-tall": [4, 0], "triangle-up": [3, 0], pentagon: [5, 0], hexagon: [6, 30] };
  const first = (value) => (Array.isArray(value) ? value[0] : value);
  const element = (name, values) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(values)) made.setAttribute(key, value);
    return made;
  };
  const corners = (count, turn, inner) =>
    Array.from({ length: count }, (_, place) => {
      const angle = ((turn + (360 * place) / count) * Math.PI) / 180;
      const radius = inner && place % 2 ? 3 : 6;
      return `${13 + radius * Math.sin(angle)},${8 - radius * Math.cos(angle)}`;
    }).join(" ");
  const swatch = (trace) => {
    const drawn = element("svg", { width: 26, height: 16, "aria-hidden": "true" });
    const marker = trace.marker || {};
    const line = trace.line || {};
    const filling = first(marker.color) || line.color;
    if (trace.type === "bar") {
      drawn.append(element("rect", { x: 6, y: 2, width: 13, height: 12, fill: filling }));
      return drawn;
    }
    const mode = trace.mode || "lines";
    if (mode.includes("lines")) {
      const dash = { dot: "2 3", dash: "6 3" }[line.dash] || "none";
      const width = Math.min(8, line.width || 2);
      drawn.append(element("line", { x1: 1, x2: 25, y1: 8, y2: 8, stroke: line.color || filling, "stroke-width": width,
                                     "stroke-dasharray": dash }));
    }
    if (!mode.includes("markers")) return drawn;
    const symbol = String(first(marker.symbol) || "circle");
    const base = symbol.replace("-open", "").replace("-thin", "");
    const open = symbol.includes("-open");
    const look = { fill: open ? "none" : filling, stroke: filling, "stroke-width": open ? 1.5 : 1 };
    if (base === "x") drawn.append(element("path", { d: "M8 3L18 13M18 3L8 13", stroke: filling, "stroke-width": 2 }));
    else if (base === "star") drawn.append(element("polygon", { points: corners(10, 0, true), ...look }));
    else if (SHAPES[base]) drawn.append(element("polygon", { points: corners(...SHAPES[base], false), ...look }));
    else drawn.append(element("circle", { cx: 13, cy: 8, r: 5, ...look }));
    return drawn;
  };

  const legend = (div, data, layout) => {
    const named = data.filter((trace) => trace.name && trace.showlegend !== false);
    let list = div.parentElement.querySelector(".legend");
    if (!named.length || (data.length < 2 && !layout.showlegend)) {
      if (list) list.remove();
      return;
    }
    if (!list) {
      list = document.createElement("ul");
      list.className = "legend";
      list.setAttribute("aria-label", "Legend: each entry shows or hides what it names");
      div.before(list);
    }
    list.replaceChildren(...named.map((trace) => {
      const group = data.flatMap((one, place) =>
        one === trace || (trace.legendgroup && one.legendgroup === trace.legendgroup) ? [place] : []);
      const key = document.createElement("button");
      const hidden = div.hiddenTraces;
      key.type = "button";
      key.append(swatch(trace), trace.name);
      key.setAttribute("aria-pressed", String(!hidden.has(trace.name)));
      key.addEventListener("click", () => {
        const show = hidden.has(trace.name);
        if (show) hidden.delete(trace.name);
        else hidden.add(trace.name);
        key.setAttribute("aria-pressed", String(show));
        Plotly.restyle(div, { visible: show }, group);
      });
      const item = document.createElement("li");
      item.append(key);
      return item;
    }));
  };

  const savePicture = (div) => {
    const below = { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom" };
    const margin = { ...div.layout.margin, t: 60 };
    const layout = { ...div.layout, showlegend: true, legend: below, margin, paper_bgcolor: colour("--page") };
    return Plotly.downloadImage({ data: div.data, layout }, {
      format: "png", filename: div.closest("section").id, width: div.clientWidth, height: div.clientHeight + 60,
    });
  };

  const styleAxes = (layout, look, narrow) => {
    const axis = { gridcolor: look.grid, linecolor: look.line, zerolinecolor: look.grid, tickcolor: look.line };
    for (const name of axesOf(layout)) {
      Object.assign(layout[name], axis);
      if (layout[name].ticktext) layout[name].fixedrange = true;  // rows, not numbers
      const title = { ...layout[name].title, font: { size: narrow ? 11 : 13, color: look.quiet } };
      if (narrow && title.text) title.text = title.text.replace(" (", "<br>(").replace(", ", ",<br>");
      layout[name].title = title;
    }
  };

  const draw = (div) => {
    const figure = JSON.parse(document.getElementById(div.dataset.figure).textContent);
    for (const trace of figure.data)
      if (trace.hovertext)
        trace.hovertext = trace.hovertext.map((text) => text.map((line) => figure.lines[line]).join("<br>"));
    const look = pageColours();
    const data = painted(figure.data, look.text);
    const layout = painted(figure.layout, look.text);
    const narrow = (printing ? PRINT_WIDTH : div.clientWidth) < NARROW;
    if (!div.hiddenTraces)
      div.hiddenTraces = new Set(data.filter((one) => one.visible === "legendonly").map((one) => one.name));
    for (const trace of data) trace.visible = !div.hiddenTraces.has(trace.legendgroup || trace.name);
    legend(div, data, layout);
    Object.assign(layout, {
      font: { color: look.text, family: getComputedStyle(document.body).fontFamily, size: narrow ? 11 : 13 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      hoverlabel: { bgcolor: look.card, bordercolor: look.line, font: { color: look.text, size: 12 }, align: "left" },
      showlegend: false,
      modebar: { bgcolor: "rgba(0,0,0,0)", color: look.quiet, activecolor: look.text },
      margin: { l: narrow ? 46 : 70, r: 16, t: 30, b: 54 },
      height: figure.layout.height ? figure.layout.height - 30 : 440,
      dragmode: touch.matches || narrow ? false : "zoom",
      autosize: !printing,
      uirevision: "kept",
    });
    if (printing) layout.width = PRINT_WIDTH;
    styleAxes(layout, look, narrow);
    Plotly.react(div, data, layout, {
      responsive: false, displaylogo: false, displayModeBar: narrow || printing ? false : "hover",
      // Named one by one: plotly.js adds others, one of which uploads the figure.
      modeBarButtons: [
        [{ name: "picture", title: "Save as a picture", icon: Plotly.Icons.camera, click: savePicture }],
        ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"],
      ],
      plotlyServerURL: "",
    });
    if (!div.followsZoom) {
      div.followsZoom = true;
      div.on("plotly_relayout", (changed) => retick(div, changed));
    }
  };

  const plots = () => [...document.querySelectorAll(".plot")];
  const drawAll = () => plots().forEach(draw);
  const drawn = new Map();
  const resized = new ResizeObserver((entries) => {
    if (printing) return;
    for (const { target } of entries) {
      if (target.isConnected && drawn.get(target) !== target.clientWidth) {
        drawn.set(target, target.clientWidth);
        draw(target);
      }
    }
  });
  dark.addEventListener("change", drawAll);
  window.addEventListener("beforeprint", () => {
    printing = true;
    for (const one of document.querySelectorAll("details")) {
      one.dataset.wasOpen = one.open;
      one.open = true;
    }
    drawAll();
  });
  window.addEventListener("afterprint", () => {
    printing = false;
    for (const one of document.querySelectorAll("details")) one.open = one.dataset.wasOpen === "true";
    drawAll();
  });

  const copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      const area = document.createElement("textarea");  // a page opened as a file may lack the clipboard's interface
      area.value = text;
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      return done;
    }
  };
  // The text of an element without lines that were removed.
  const copied = (node) => {
    const kept = node.cloneNode(true);
    kept.querySelectorAll("del").forEach((line) => line.remove());
    return kept.textContent;
  };
  const copyOnClick = (button) => {
    button.addEventListener("click", async () => {
      const done = await copy(copied(document.getElementById(button.dataset.copy)));
      const told = button.textContent;
      button.textContent = done ? "Copied" : "Select the text and copy it";
      const status = document.getElementById("copied");
      if (status) status.textContent = done && button.dataset.copy === "best-config" ? "The config is copied." : "";
      button.focus();
      setTimeout(() => { button.textContent = told; }, 2000);
    });
  };
  const isNumber = (cell) => cell.classList.contains("number") || cell.scope === "row";
  // Sorts by numbers, or by text; rows without a value come last.
  const sort = (table, column, down) => {
    const worth = (row) => {
      const text = row.cells[column].textContent.trim();
      return isNumber(row.cells[column]) ? Number(text.replaceAll(",", "")) : text;
    };
    const rows = [...table.tBodies[0].rows].map((row) => [worth(row), row]);
    rows.sort(([a], [b]) => {
      if (a === "" || b === "") return (a === "") - (b === "");
      return (down ? -1 : 1) * (typeof a === "number" ? a - b : a.localeCompare(b));
    });
    table.tBodies[0].append(...rows.map(([, row]) => row));
    for (const [place, cell] of [...table.tHead.rows[0].cells].entries())
      if (cell.ariaSort) cell.ariaSort = place !== column ? "none" : down ? "descending" : "ascending";
    table.dataset.sorted = JSON.stringify([column, down]);
  };
  const sortOnClick = (table) => {
    for (const button of table.querySelectorAll("thead button")) {
      button.addEventListener("click", () => {
        const cell = button.parentElement;
        const largestFirst = [...table.tBodies[0].rows].some((row) => isNumber(row.cells[cell.cellIndex]));
        sort(table, cell.cellIndex, cell.ariaSort === "none" ? largestFirst : cell.ariaSort === "ascending");
      });
    }
  };
  // Marks the link to the section at the top of the window.
  const markSection = () => {
    const links = [...document.querySelectorAll("nav a")];
    const passed = links.filter((link) => document.querySelector(link.hash)?.getBoundingClientRect().top < innerHeight / 3);
    const current = passed[passed.length - 1] || links[0];
    for (const link of links) {
      if (link === current && link.ariaCurrent !== "true" && link.parentElement.scrollWidth > link.parentElement.clientWidth)
        link.parentElement.scrollLeft = link.offsetLeft - 16;
      link.ariaCurrent = link === current ? "true" : null;
    }
  };
  const filterOnInput = (input) => {
    const rows = [...document.getElementById(input.dataset.filter).tBodies[0].rows];
    input.addEventListener("input", () => {
      const wanted = input.value.trim().toLowerCase();
      for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    });
  };
  const tellWidth = (scroll) => {
    const more = scroll.parentElement.querySelector(".more");
    if (more) more.hidden = scroll.scrollLeft + scroll.clientWidth >= scroll.scrollWidth - 2;
  };
  const widths = new ResizeObserver((entries) => entries.forEach(({ target }) => tellWidth(target)));

  // Makes what is below a node work: figures, buttons, tables.
  const mount = (root) => {
    root.querySelectorAll(".plot").forEach((div) => resized.observe(div));
    root.querySelectorAll("[data-copy]").forEach(copyOnClick);
    root.querySelectorAll("[data-filter]").forEach(filterOnInput);
    root.querySelectorAll("[data-sortable]").forEach(sortOnClick);
    root.querySelectorAll(".scroll").forEach((scroll) => {
      scroll.addEventListener("scroll", () => tellWidth(scroll), { passive: true });
      widths.observe(scroll);
    });
    markSection();
  };
  mount(document);
  window.addEventListener("scroll", markSection, { passive: true });
  return { mount, draw, sort };
})();
