"use strict";
(() => {
  const PAUSE_MS = 2000;
  const study = document.getElementById("study");
  const contact = document.getElementById("contact");
  const name = document.title;
  let version = study.dataset.version;

  const inside = (html) => new DOMParser().parseFromString(html, "text/html").body;

  // Tables stay where they were scrolled to.
  const replace = (node, next) => {
    const scrolled = new Map([...node.querySelectorAll(".scroll")].map((one) => [one.ariaLabel, one.scrollLeft]));
    node.replaceChildren(...next.childNodes);
    optunaDsat.mount(node);
    for (const one of node.querySelectorAll(".scroll")) one.scrollLeft = scrolled.get(one.ariaLabel) || 0;
  };

  // Figures keep their elements, and so their zoom; what was opened or typed stays.
  const swap = (html) => {
    const next = inside(html);
    const kept = [];
    for (const div of next.querySelectorAll(".plot")) {
      const old = study.querySelector(`.plot[data-figure="${div.dataset.figure}"]`);
      if (old) {
        div.replaceWith(old);
        kept.push(old);
      }
    }
    for (const one of next.querySelectorAll("details[id]")) {
      const old = document.getElementById(one.id);
      one.open = old === null ? one.open : old.open;
    }
    const typed = [...study.querySelectorAll("[data-filter]")].map((one) => [one.dataset.filter, one.value,
                                                                            one === document.activeElement]);
    const sorted = [...study.querySelectorAll("[data-sorted]")].map((one) => [one.id, JSON.parse(one.dataset.sorted)]);
    replace(study, next);
    for (const [table, order] of sorted) {
      const found = document.getElementById(table);
      if (found) optunaDsat.sort(found, ...order);
    }
    for (const [table, value, focused] of typed) {
      const input = study.querySelector(`[data-filter="${table}"]`);
      if (!input) continue;
      input.value = value;
      input.dispatchEvent(new Event("input"));
      if (focused) input.focus();
    }
    kept.forEach(optunaDsat.draw);
  };

  const fetched = async (path) => {
    const response = await fetch(path, { cache: "no-store" });
    if (!response.ok) throw new Error(await response.text());
    return response.json();
  };

  const look = async () => {
    try {
      const now = await fetched("/now");
      const panel = document.getElementById("now");
      replace(panel, inside(now.html));
      if (now.version !== version) {
        const found = await fetched("/study");
        swap(found.html);
        version = found.version;
      }
      const told = panel.querySelector(".live");
      document.title = told ? `${told.textContent.split(",")[0]} - ${name}` : name;
      contact.hidden = true;
    } catch {
      contact.hidden = false;
    }
  };

  const follow = async () => {
    if (!document.hidden) await look();
    setTimeout(follow, PAUSE_MS);
  };
  setTimeout(follow, PAUSE_MS);
})();
