"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const sides = ["left", "right"];
  const selects = sides.map((side) => byId(side + "-pass"));
  const panes = sides.map(byId);
  const onlyChanges = byId("only-changes");
  const final = data.passes.length - 1;

  // A line of a function: its text, indentation, op (undefined for lines without one) and place in the source.
  const body = (pass) => data.bodies[data.passes[pass].body].map(([text, depth, op, file, line]) => ({
    text: data.texts[text], depth, op, place: file === undefined ? "" : `${file}:${line}`,
  }));
  const changed = (pass) => pass === 0 || data.passes[pass].body !== data.passes[pass - 1].body;

  // Text and enclosing op of each op.
  const opsOf = (lines) => {
    const ops = new Map(), open = [];
    for (const { op, depth, text } of lines) {
      if (op === undefined) continue;
      open[depth] = op;
      ops.set(op, { text, parent: depth > 0 ? open[depth - 1] : undefined });
    }
    return ops;
  };

  const MARKS = { added: "+", removed: "−", changed: "~", moved: "↕" };
  const status = (op, own, other, missing) => {
    if (op === undefined) return "";
    const here = own.get(op), there = other.get(op);
    if (!there) return missing;
    if (here.text !== there.text) return "changed";
    return here.parent === there.parent ? "" : "moved";
  };

  const element = (tag, className, text) => {
    const made = document.createElement(tag);
    made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  const show = () => {
    const lines = selects.map((select) => body(Number(select.value)));
    const ops = lines.map(opsOf);
    const counts = { added: 0, removed: 0, changed: 0, moved: 0 };
    sides.forEach((_, i) => {
      const rows = lines[i].map(({ text, depth, op, place }) => {
        const state = status(op, ops[i], ops[1 - i], i === 0 ? "removed" : "added");
        if (state && (i === 1 || state === "removed")) counts[state] += 1;
        const row = element("div", `line ${state}`);
        if (op !== undefined) row.dataset.op = op;
        if (place) row.dataset.place = place;
        row.append(element("span", "mark", MARKS[state] || ""), element("span", "text", "  ".repeat(depth) + text));
        return row;
      });
      panes[i].replaceChildren(...rows);
    });
    const words = Object.entries(counts).filter(([, n]) => n > 0).map(([state, n]) => `${n} ${state}`);
    byId("changes").textContent = words.length ? `Ops: ${words.join(", ")}` : "No op differs";
    byId("previous").disabled = neighbor(-1) === undefined;
    byId("next").disabled = neighbor(1) === undefined;
    highlight("pin", pinned);
  };

  // The next pass of the right column in a direction.
  const neighbor = (step) => {
    for (let pass = Number(selects[1].value) + step; pass >= 1 && pass <= final; pass += step) {
      if (!onlyChanges.checked || changed(pass)) return pass;
    }
    return undefined;
  };
  const step = (direction) => {
    const pass = neighbor(direction);
    if (pass === undefined) return;
    selects[1].value = pass;
    selects[0].value = pass - 1;
    show();
  };

  // What belongs together: the lines of an op, and all lines of a source line.
  let pinned = null;
  const target = (node) => {
    const found = node && node.closest && node.closest("[data-op], [data-place]");
    if (!found) return null;
    const { op, place } = found.dataset;
    return { node: found, op, place: place || placeOf(op) };
  };
  const places = new Map(body(final).map(({ op, place }) => [String(op), place]));
  const placeOf = (op) => places.get(op) || "";
  const related = ({ op, place }) => {
    const selectors = [];
    if (place) selectors.push(`.line[data-place="${place}"]`);
    if (op !== undefined) selectors.push(`[data-op="${op}"]`);
    return selectors.length ? [...document.querySelectorAll(selectors.join(","))] : [];
  };
  const highlight = (className, at) => {
    document.querySelectorAll("." + className).forEach((node) => node.classList.remove(className));
    if (at) related(at).forEach((node) => node.classList.add(className));
  };
  // The line where the keys of a column continue.
  const setCurrent = (pane, line) => {
    pane.querySelectorAll(".current").forEach((old) => old.classList.remove("current"));
    if (line) line.classList.add("current");
  };
  const scrollTo = (at) => {
    for (const pane of [byId("source"), ...panes]) {
      if (pane.contains(at.node)) continue;
      const own = at.op !== undefined && pane.querySelector(`.line[data-op="${at.op}"]`);
      const line = own || (at.place && pane.querySelector(`.line[data-place="${at.place}"]`));
      if (!line) continue;
      setCurrent(pane, line);
      pane.scrollTop += line.getBoundingClientRect().top - pane.getBoundingClientRect().top - pane.clientHeight / 3;
    }
  };
  const pin = (at) => {
    pinned = at;
    highlight("pin", at);
    if (at) scrollTo(at);
  };

  document.addEventListener("mouseover", (event) => highlight("point", target(event.target)));
  document.addEventListener("focusin", (event) => {
    if (!event.target.classList.contains("pane")) highlight("point", target(event.target));
  });
  document.addEventListener("click", (event) => {
    const at = target(event.target);
    if (!at) return;
    const inPane = at.node.classList.contains("line");
    if (!inPane) {
      // Pictures and tables show the function after the last pass.
      event.preventDefault();
      if (Number(selects[1].value) !== final) {
        selects[1].value = final;
        show();
      }
      byId("ir").scrollIntoView();
      panes[1].focus({ preventScroll: true });
    }
    if (inPane) setCurrent(at.node.closest(".pane"), at.node);
    pin(at);
  });

  // Keys in a column: arrows move a current line, Enter scrolls the other columns to it, Escape ends the highlight.
  const pageLines = 15;
  const MOVES = { ArrowDown: 1, ArrowUp: -1, PageDown: pageLines, PageUp: -pageLines, Home: -Infinity, End: Infinity };
  for (const pane of [byId("source"), ...panes]) {
    pane.addEventListener("keydown", (event) => {
      const lines = [...pane.querySelectorAll(".line")];
      const current = pane.querySelector(".current");
      if (event.key in MOVES && lines.length) {
        event.preventDefault();
        const from = lines.indexOf(current);
        const to = Math.max(0, Math.min(lines.length - 1, from < 0 ? 0 : from + MOVES[event.key]));
        setCurrent(pane, lines[to]);
        lines[to].scrollIntoView({ block: "nearest", inline: "nearest" });
        highlight("point", target(lines[to]));
      } else if (event.key === "Enter" && current) {
        pin(target(current));
      } else if (event.key === "Escape") {
        setCurrent(pane, null);
        highlight("point", null);
        pin(null);
      }
    });
  }

  selects.forEach((select) => {
    data.passes.forEach(({ name, stage }, pass) => {
      const option = element("option", "", `${pass}. ${name} (${stage})${changed(pass) ? "" : ", no change"}`);
      option.value = pass;
      select.append(option);
    });
    select.addEventListener("change", show);
  });
  selects[0].value = 0;
  selects[1].value = final;
  byId("previous").addEventListener("click", () => step(-1));
  byId("next").addEventListener("click", () => step(1));
  onlyChanges.addEventListener("change", show);
  document.querySelectorAll("#ir [hidden]").forEach((node) => { node.hidden = false; });
  show();
})();
