"use strict";
(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const waiting = new Map();
  for (const own of document.querySelectorAll("script[data-picture]")) waiting.set(own.dataset.picture, own);

  /* Axes, legends and scales of a picture in the page's ink; colours of data are the same on white and on black. */
  function ink(model) {
    const colour = dark.matches ? "#c9d1d9" : "#3b434b";
    const wanted = ["axis_label_text_color", "major_label_text_color", "axis_line_color", "major_tick_line_color",
      "minor_tick_line_color", "label_text_color", "title_text_color"];
    const values = {};
    for (const name of wanted) if (name in model.properties) values[name] = colour;
    for (const name of ["text_color", "line_color"]) {
      if (!(name in model.properties) || !model[name]) continue;
      if (model[name] === "#767676") values[name] = colour;
      else if (model[name].value === "#767676") values[name] = {value: colour};
    }
    if (Object.keys(values).length) model.setv(values);
  }

  function paint() {
    for (const doc of Bokeh.documents) {
      for (const root of doc.roots()) for (const model of root.references()) ink(model);
    }
  }

  /* Legends have as many columns as there is room for. */
  const places = new Map();
  function fit() {
    for (const [place, doc] of places) {
      if (!place.clientWidth) continue;
      for (const root of doc.roots()) for (const model of root.references()) {
        if (model.type !== "Legend" || model.tags[0] !== "entry-pixels") continue;
        const columns = Math.floor((place.clientWidth - 40) / model.tags[1]);
        const ncols = Math.max(1, Math.min(model.items.length, columns));
        if (model.ncols !== ncols) model.ncols = ncols;
      }
    }
  }

  async function draw(place) {
    const source = waiting.get(place.id);
    if (!source) return;
    waiting.delete(place.id);
    await Bokeh.embed.embed_item(JSON.parse(source.textContent), place.id);
    source.remove();
    places.set(place, Bokeh.documents.at(-1));
    fit();
    paint();
  }

  /* Draws what can be seen and is not drawn yet; a picture in a closed tab costs nothing until it is opened. */
  async function drawShown(root) {
    for (const place of root.querySelectorAll(".picture")) {
      if (!place.closest("[hidden]")) await draw(place);
    }
    root.dataset.drawn = "yes";
  }

  const tabs = [...document.querySelectorAll('[role="tab"]')];
  function open(key) {
    const chosen = tabs.find((tab) => tab.getAttribute("aria-controls") === key) || tabs[0];
    if (!chosen) return;
    for (const tab of tabs) {
      const is = tab === chosen;
      tab.setAttribute("aria-selected", String(is));
      tab.tabIndex = is ? 0 : -1;
      document.getElementById(tab.getAttribute("aria-controls")).hidden = !is;
    }
    window.scrollTo(0, 0);
    return drawShown(document.getElementById(chosen.getAttribute("aria-controls")));
  }
  for (const [place, tab] of tabs.entries()) {
    tab.addEventListener("click", () => { history.replaceState(null, "", "#" + tab.getAttribute("aria-controls")); open(tab.getAttribute("aria-controls")); });
    tab.addEventListener("keydown", (event) => {
      const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
      if (step) { const next = tabs[(place + step + tabs.length) % tabs.length]; next.focus(); next.click(); }
    });
  }
  for (const choice of document.querySelectorAll(".choice")) {
    const select = choice.querySelector("select");
    if (select) select.addEventListener("change", () => {
      [...choice.querySelectorAll(".option")].forEach((option, i) => { option.hidden = i !== select.selectedIndex; });
      drawShown(choice);
    });
  }
  dark.addEventListener("change", paint);
  window.addEventListener("resize", fit);
  window.addEventListener("hashchange", () => open(location.hash.slice(1)));
  open(location.hash.slice(1));
})();
