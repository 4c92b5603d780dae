// One player: fills the element of this id with controls and grids. The notebook stores it once for
// every player, so it is short; page.py takes comments and indentation out.
(id, d) => document.querySelectorAll("#" + id).forEach(root => {
  if (root.dataset.ready) return;
  root.dataset.ready = 1;
  const put = (to, tag, name, text) => {
    const e = document.createElement(tag);
    if (name) e.className = "spindle-" + name;
    e.textContent = text ?? "";
    to.append(e);
    return e;
  };
  const texts = root.querySelector("details"), items = texts?.querySelectorAll("li");
  const stage = document.createElement("div"), last = d.last;
  root.insertBefore(stage, texts);
  if (texts) texts.open = false;
  // JupyterLab's own shortcuts (arrows, space) are off in here.
  stage.dataset.lmSuppressShortcuts = "true";

  const bar = put(stage, "div", "controls");
  const aria = (e, name, value) => (e.setAttribute(name, value), e);
  const button = (name, sign) => aria(
    Object.assign(put(bar, "button", "", sign), {type: "button"}), "aria-label", name);
  const back = button("step back", "\u2039"), play = button("play", "\u25b6\ufe0e");
  const next = button("next step", "\u203a"), slider = put(bar, "input");
  const count = put(bar, "span"), says = put(stage, "p", "says");
  aria(Object.assign(slider, {type: "range", min: 0, max: last}), "aria-label", "step");
  aria(says, "aria-live", "polite");

  const colour = (e, owner) => {
    if (owner === undefined) e.style.removeProperty("--c");
    else e.style.setProperty("--c", d.owners[owner][1]);
  };
  const owned = o => [o ?? []].flat();
  const MARKS = {drafted: "?", accepted: "\u2713", rejected: "\u2717", dropped: "\u2013", bonus: "+"};
  const panels = d.panels.map(p => {
    const box = put(stage, "div", `panel spindle-${p.look}s`);
    if (p.title) put(box, "div", "title", p.title);
    const body = put(box, "div", "body"), bars = p.look == "bar";
    if (p.lines.length) {
      const names = put(body, "div", "lines");
      p.lines.forEach(line => put(names, "span", "", line));
    }
    const scroll = put(body, "div", "box"), grid = put(scroll, "div", "grid"), cells = [];
    aria(grid, "role", "img");
    const least = bars ? p.columns > 200 ? "2px" : "4px" : p.look == "chip" && p.columns ? "2.6em" : "0";
    grid.style.gridTemplateColumns = p.columns ? `repeat(${p.columns},minmax(${least},1fr))` :
      "repeat(auto-fill,minmax(5.2em,1fr))";
    if (p.columns > 60 || p.look == "wide") grid.style.columnGap = p.columns > 60 ? 0 : "1px";
    for (let n = 0; n < p.size; n++) cells.push(put(grid, "div"));
    const key = put(box, "div", "key");
    p.kinds.forEach(([name, look]) => {
      const one = put(key, "span");
      put(one, "i", p.look == "chip" ? "chip spindle-" + look : look, MARKS[name]);
      one.append(name);
    });
    // What each step changes: [number, cell]. In a timeline equal neighbours came as one, and step
    // n changes column n.
    const steps = (p.steps ?? Array(last + 1).fill([])).map(
      changes => changes.map(([n, ...cell]) => [n, cell]));
    p.runs?.forEach(([n, many, ...cell]) => {
      for (let i = n; i < n + many; i++) steps[i % p.columns].push([i, cell]);
    });
    return {...p, bars, scroll, grid, cells, steps, drawn: []};
  });
  const named = new Set(d.panels.flatMap(p => p.lines)), key = put(stage, "div", "key");
  d.owners.forEach(([name, tint]) => {
    if (named.has(name) && d.owners.length > 12) return;
    const one = put(key, "span");
    put(one, "i", "full").style.setProperty("--c", tint);
    one.append(name);
  });

  const draw = (p, n, [owners, filled, kind, words]) => {
    const cell = p.cells[n], who = owned(owners), free = owners === undefined;
    const names = words ?? who.map(o => d.owners[o][0]).join(" ");
    const [kindName, look] = kind ? p.kinds[kind - 1] : ["", ""];
    const line = p.lines[Math.floor(n / p.columns)];
    const place = line === undefined ? n : p.bars ? line : `${line} ${n % p.columns}`;
    const held = who.length && p.slots > 1 ? `${filled}/${p.slots}` : "";
    cell.title = place + ": " + (free ? "free" : [kindName, names, held].filter(Boolean).join(" "));
    cell.className = p.bars ? look && "spindle-" + look : "spindle-" + p.look +
      (free ? " spindle-free" : look && p.look == "chip" ? " spindle-" + look : "");
    cell.textContent = "";
    colour(cell, who[0]);
    if (p.bars) return;
    if (p.look == "chip") {
      const mark = MARKS[kindName];
      cell.textContent = free ? "" : mark ? mark + " " + names : names;
      return;
    }
    if (p.look == "block") {
      put(cell, "small", "", p.lines.length ? "" : n);
      put(cell, "span", "", names || kindName || "\u00a0");
    }
    const fill = put(cell, "div", "fill");
    (who.length ? who : kind ? [undefined] : []).forEach(o => {
      const i = put(fill, "i", look || "full");
      i.style.width = filled / p.slots * 100 + "%";
      colour(i, o);
    });
    if (p.slots > 1 && p.slots < 17) {
      const marks = put(fill, "u");
      for (let slot = 0; slot < p.slots; slot++) put(marks, "b");
    }
  };
  const FREE = [];
  const state = (p, to) => {
    const cells = Array(p.size).fill(FREE);
    for (let i = 0; i <= to; i++) p.steps[i].forEach(([n, cell]) => { cells[n] = cell; });
    return cells;
  };
  let at = 0, timer = 0;
  const show = to => {
    at = Math.min(Math.max(to, 0), last);
    panels.forEach(p => {
      const news = new Set(at || p.bars ? p.steps[at].map(change => change[0]) : []);
      state(p, at).forEach((cell, n) => {
        if (p.drawn[n] !== cell) draw(p, n, p.drawn[n] = cell);
        p.cells[n].classList.toggle("spindle-new", news.has(n));
      });
      aria(p.grid, "aria-label", `${p.title || "cells"}, step ${at + 1} of ${last + 1}`);
      if (p.bars) p.scroll.scrollLeft = p.cells[at].offsetLeft - p.scroll.clientWidth * .7;
    });
    says.textContent = d.says?.[at] ?? items[at].firstChild.textContent;
    count.textContent = `${at + 1} of ${last + 1}`;
    slider.value = at;
    back.disabled = at == 0;
    next.disabled = at == last;
  };
  // While it plays nothing is read out; where it stops, that is.
  const run = on => {
    clearInterval(timer);
    timer = 0;
    play.textContent = on ? "\u275a\u275a" : "\u25b6\ufe0e";
    aria(play, "aria-label", on ? "pause" : "play");
    aria(says, "aria-live", on ? "off" : "polite");
    if (!on) return;
    if (at == last) show(0);
    timer = setInterval(() => {
      show(at + 1);
      if (at == last) run(false);
    }, Math.min(900, Math.max(120, 30000 / last)));
  };
  const go = to => { if (timer) run(false); show(to); };
  back.onclick = () => go(at - 1);
  next.onclick = () => go(at + 1);
  play.onclick = () => run(!timer);
  slider.oninput = () => go(+slider.value);
  stage.tabIndex = 0;
  stage.onkeydown = event => {
    const {key, target} = event;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const to = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last}[key];
    const space = key == " " && target.tagName != "BUTTON";
    if (to === undefined && !space) return;
    event.preventDefault();
    event.stopPropagation();
    space ? run(!timer) : go(to);
  };
  root.spindle = {show: go, at: () => at};
  show(0);
})
