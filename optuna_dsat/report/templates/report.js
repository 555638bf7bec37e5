"use strict";
(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(pointer: coarse)");
  const PRINT_WIDTH = 660;  // px of an A4 page between its margins, at 96 px an inch, and some room
  const NARROW = 620;
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

  const legendRows = (data, layout, width) => {
    const names = data.filter((t) => t.name && t.showlegend !== false).map((t) => t.name);
    if (!names.length || (data.length < 2 && !layout.showlegend)) return 0;
    const widest = Math.max(...names.map((name) => name.length)) * 6.4 + 50;
    return Math.ceil(names.length / Math.max(1, Math.floor(width / widest)));
  };

  const draw = (div) => {
    const figure = JSON.parse(document.getElementById(div.dataset.figure).textContent);
    const look = pageColours();
    const data = painted(figure.data, look.text);
    const layout = painted(figure.layout, look.text);
    const width = printing ? PRINT_WIDTH : div.clientWidth;
    const narrow = width < NARROW;
    const rows = legendRows(data, layout, width);
    const axis = { gridcolor: look.grid, linecolor: look.line, zerolinecolor: look.grid, tickcolor: look.line };
    Object.assign(layout, {
      font: { color: look.text, family: getComputedStyle(document.body).fontFamily, size: narrow ? 11 : 13 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      hoverlabel: { bgcolor: look.card, bordercolor: look.line, font: { color: look.text, size: 12 }, align: "left" },
      legend: { orientation: "h", x: 0, xref: "container", xanchor: "left", y: 1, yref: "container", yanchor: "top",
                font: { size: narrow ? 10 : 12, color: look.text } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: look.quiet, activecolor: look.text },
      margin: { l: narrow ? 46 : 70, r: 12, t: 12 + rows * 22, b: 54 },
      height: (figure.layout.height || 440) + rows * 22 - (figure.layout.height ? 60 : 0),
      dragmode: touch.matches || narrow ? false : "zoom",
      autosize: !printing,
    });
    if (printing) layout.width = PRINT_WIDTH;
    for (const name of Object.keys(layout)) {
      if (/^[xy]axis\d*$/.test(name)) {
        Object.assign(layout[name], axis);
        const title = { ...layout[name].title, font: { size: narrow ? 11 : 13, color: look.quiet } };
        if (narrow && title.text) title.text = title.text.replace(" (", "<br>(");
        layout[name].title = title;
      }
    }
    Plotly.react(div, data, layout, {
      responsive: false, displaylogo: false, displayModeBar: narrow || printing ? false : "hover",
      // Named one by one: plotly.js adds others, one of which uploads the figure.
      modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"]],
      toImageButtonOptions: { filename: div.closest("section").id },
      plotlyServerURL: "",
    });
  };

  const plots = [...document.querySelectorAll(".plot")];
  const drawAll = () => plots.forEach(draw);
  const drawn = new Map();
  const resized = new ResizeObserver((entries) => {
    if (printing) return;
    for (const { target } of entries) {
      if (drawn.get(target) !== target.clientWidth) {
        drawn.set(target, target.clientWidth);
        draw(target);
      }
    }
  });
  plots.forEach((div) => resized.observe(div));
  dark.addEventListener("change", drawAll);
  window.addEventListener("beforeprint", () => {
    printing = true;
    for (const one of document.querySelectorAll("details")) {
      one.dataset.wasOpen = one.open;
      one.open = one.open || one.closest("#launches") === null;
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
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", async () => {
      const done = await copy(document.getElementById(button.dataset.copy).textContent);
      const told = button.textContent;
      button.textContent = done ? "Copied" : "Select the text and copy it";
      const status = document.getElementById("copied");
      if (status) status.textContent = done && button.dataset.copy === "best-config" ? "The config is copied." : "";
      button.focus();
      setTimeout(() => { button.textContent = told; }, 2000);
    });
  }

  for (const input of document.querySelectorAll("[data-filter]")) {
    const rows = [...document.getElementById(input.dataset.filter).tBodies[0].rows];
    input.addEventListener("input", () => {
      const wanted = input.value.trim().toLowerCase();
      for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    });
  }
})();
