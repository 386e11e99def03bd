// Appended to a page by `browser_tests.rs`: uses it as a reader would, and writes what happened to an element `results`.
"use strict";
(() => {
  const results = { errors: window.pageErrors };
  const byId = (id) => document.getElementById(id);
  const check = (name, value) => { results[name] = value; };
  const fire = (node, type, init) => {
    const Kind = type.startsWith("key") ? KeyboardEvent : MouseEvent;
    node.dispatchEvent(new Kind(type, { bubbles: true, ...init }));
  };
  const count = (selector) => document.querySelectorAll(selector).length;
  try {
    check("width", document.documentElement.scrollWidth);
    check("viewport", document.documentElement.clientWidth);
    const [left, right] = ["left-pass", "right-pass"].map(byId);
    check("passes", right.options.length);
    check("last", Number(right.value));
    check("lines", ["left", "right"].map((id) => byId(id).querySelectorAll(".line").length));
    check("hidden", count("#ir [hidden]"));

    byId("previous").click();
    check("afterPrevious", [Number(left.value), Number(right.value)]);
    byId("next").click();
    check("nextIsDisabled", byId("next").disabled);
    left.value = right.value;
    left.dispatchEvent(new Event("change"));
    check("samePass", byId("changes").textContent);
    byId("only-changes").click();
    byId("previous").click();
    check("onlyChanges", byId("changes").textContent);

    // A bar of a timeline belongs to a line of the IR after the last pass, and to a source line.
    const bar = document.querySelector("#timeline [data-op]");
    fire(bar, "mouseover");
    check("pointed", [count("#right .point"), count("#source .point")]);
    fire(bar, "click");
    check("pinned", count("#right .line.pin"));
    check("backToLast", Number(right.value));
    const pinned = byId("right").querySelector(`.line[data-op="${bar.dataset.op}"]`).getBoundingClientRect();
    const pane = byId("right").getBoundingClientRect();
    check("isVisible", pinned.top >= pane.top && pinned.bottom <= pane.bottom);
    fire(byId("right"), "keydown", { key: "Escape" });
    check("unpinned", count(".pin"));
    fire(byId("right"), "keydown", { key: "ArrowDown" });
    fire(byId("right"), "keydown", { key: "ArrowDown" });
    check("current", [...byId("right").querySelectorAll(".line")].findIndex((line) => line.classList.contains("current")));

    // Contrast of text with what is behind it (WCAG 2.2, 1.4.3).
    const numbers = (color) => (color.match(/[\d.]+/g) || []).map(Number);
    const luminance = (color) => {
      const [r, g, b] = numbers(color).map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const opaque = (color) => numbers(color).length === 3 || numbers(color)[3] === 1;
    const behind = (node) => {
      for (let at = node; at; at = at.parentElement) {
        const color = getComputedStyle(at).backgroundColor;
        if (opaque(color)) return color;
      }
      return getComputedStyle(document.documentElement).colorScheme.includes("dark") && matchMedia("(prefers-color-scheme: dark)").matches
        ? "rgb(18, 18, 18)" : "rgb(255, 255, 255)";
    };
    const contrast = (node) => {
      const isSvg = node instanceof SVGElement;
      const [a, b] = [isSvg ? getComputedStyle(node).fill : getComputedStyle(node).color, behind(node)].map(luminance);
      return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    };
    const texts = ["p", "td", "th", "a", "h2", "option", ".note", ".line .text", ".line.added .text", "svg text.small"];
    check("contrast", Object.fromEntries(texts.map((selector) => {
      const node = document.querySelector(selector);
      return [selector, node ? contrast(node) : null];
    })));
    check("background", behind(document.body));
    check("pictures", [...document.querySelectorAll("#timeline svg")].map((svg) => svg.getAttribute("aria-label")));
  } catch (error) {
    results.errors.push(String(error.stack));
  }
  const shown = document.createElement("pre");
  shown.id = "results";
  shown.textContent = JSON.stringify(results);
  document.body.append(shown);
})();
