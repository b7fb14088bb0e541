"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const tip = document.getElementById("tip");
  const format = (value) =>
    value.toLocaleString("en", Math.abs(value) >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 4 });

  // Without this script everything is shown and nothing can be chosen.
  all("[data-choice], .pick, .buttons").forEach((element) => (element.hidden = false));
  all(".arms input").forEach((input) => (input.disabled = false));

  const show = (name, id) =>
    all(`[data-of="${name}"]`).forEach((element) => (element.hidden = element.id !== id));
  for (const set of all("[data-choice]")) {
    const update = () => show(set.dataset.choice, set.querySelector("input:checked").value);
    set.addEventListener("change", update);
    update();
  }
  const select = document.querySelector("[data-select]");
  if (select) {
    const update = () =>
      all(".detail").forEach((element) => (element.hidden = element.dataset.detail !== select.value));
    select.addEventListener("change", update);
    update();
  }

  const light = (input) => {
    input.closest("label").classList.toggle("unlit", !input.checked);
    for (const line of all(`.s[data-arm="${input.dataset.arm}"]`)) {
      line.classList.toggle("off", !input.checked);
      if (input.checked) line.parentNode.append(line); // in front of those in grey
    }
  };
  for (const input of all(".arms input")) {
    input.addEventListener("change", () => light(input));
    light(input); // a browser may have kept what was chosen before a reload
    const lines = () => all(`.s[data-arm="${input.dataset.arm}"]`);
    const label = input.closest("label");
    label.addEventListener("mouseenter", () => lines().forEach((line) => line.classList.add("hot")));
    label.addEventListener("mouseleave", () => lines().forEach((line) => line.classList.remove("hot")));
  }
  all("[data-arms]").forEach((button) =>
    button.addEventListener("click", () =>
      all(".arms input").forEach((input) => {
        input.checked = button.dataset.arms === "all";
        light(input);
      })
    )
  );

  // Episodes, one turn at a time.
  for (const episode of all(".episode")) {
    const turns = all(".turn", episode);
    const pick = episode.querySelector(".turn-pick");
    let at = 0;
    const update = () => {
      turns.forEach((turn, i) => (turn.hidden = i !== at));
      pick.querySelector("span").textContent = `${at + 1} of ${turns.length}`;
      all("button", pick).forEach((button) => {
        const to = at + Number(button.dataset.turn);
        button.disabled = to < 0 || to >= turns.length;
      });
    };
    all("button", pick).forEach((button) =>
      button.addEventListener("click", () => {
        at += Number(button.dataset.turn);
        update();
      })
    );
    pick.hidden = turns.length < 2;
    if (turns.length > 1) update();
  }

  // Values under the pointer, read back from what is drawn.
  const numbers = (text) => text.match(/-?[\d.]+/g).map(Number);
  const points = (path) => {
    if (!path.points) {
      const found = numbers(path.getAttribute("d"));
      path.points = found.filter((_, i) => i % 2 === 0).map((x, i) => [x, found[2 * i + 1]]);
    }
    return path.points;
  };
  let hot = null;
  const heat = (group) => {
    if (hot) hot.classList.remove("hot");
    hot = group;
    if (hot) hot.classList.add("hot");
  };

  const onLines = (svg, x, y) => {
    const [left, top, width, height] = numbers(svg.dataset.box);
    const [x0, x1, y0, y1] = svg.dataset.range.split(" ").map(Number);
    let best = null;
    for (const group of all(".s", svg)) {
      const path = group.querySelector(".line");
      points(path).forEach(([px, py], i, list) => {
        let distance = Math.hypot(px - x, py - y);
        if (group.classList.contains("off")) distance = distance * 2 + 6;
        if (distance < 60 && (!best || distance < best.distance)) best = { distance, group, px, py, i, count: list.length };
      });
    }
    heat(best && best.group);
    if (!best) return "";
    const value = (py) => format(y1 - ((py - top) / height) * (y1 - y0));
    const lines = [best.group.dataset.name, `${svg.dataset.x}: ${format(x0 + ((best.px - left) / width) * (x1 - x0))}`];
    const band = best.group.querySelector(".band");
    const around = band && points(band);
    lines.push(value(best.py) + (around ? ` [${value(around[2 * best.count - 1 - best.i][1])}, ${value(around[best.i][1])}]` : ""));
    return lines.join("\n");
  };
  const onGrid = (svg, x, y) => {
    const [left, top, width, height] = numbers(svg.dataset.box);
    const edges = svg.dataset.edges.split(",").map(Number);
    const step = edges[0] + ((x - left) / width) * (edges[edges.length - 1] - edges[0]);
    const column = edges.findIndex((edge, i) => edge <= step && step < edges[i + 1]);
    if (column < 0 || y < top || y > top + height) return "";
    const names = svg.dataset.rows.split("|");
    const rows = svg.dataset.values.split(";").map((row) => row.split(","));
    const last = edges[column + 1] - 1;
    const head = last > edges[column] ? `steps ${edges[column]} to ${last}` : `step ${edges[column]}`;
    if (svg.dataset.kind === "heat") {
      const row = Math.min(names.length - 1, Math.floor(((y - top) / height) * names.length));
      const value = rows[row][column];
      return value === "" ? "" : `${head}, ${names[row]}\n${format(Number(value))}`;
    }
    const told = names.map((name, i) => [name, Number(rows[i][column])]).filter(([, value]) => value);
    return [head, ...told.map(([name, value]) => `${name}: ${format(value)}`)].join("\n");
  };

  const move = (event) => {
    const svg = event.target.closest && event.target.closest("svg[data-kind]");
    let text = "";
    if (svg) {
      const marked = event.target.closest("[data-tip]");
      if (marked) text = marked.dataset.tip;
      else if (svg.dataset.box) {
        const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
        text = svg.dataset.kind === "lines" ? onLines(svg, at.x, at.y) : onGrid(svg, at.x, at.y);
      }
    } else heat(null);
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 6))}px`;
    tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 18}px`;
  };
  document.addEventListener("pointermove", move);
  document.addEventListener("pointerdown", move);
  document.addEventListener("scroll", () => (tip.hidden = true), true);
})();
