/** Lanes draw what is new, at most once a frame. */
"use strict";

/** Each line is a block of its own, so that one more word does not lay out the whole answer again. */
class TextView {
  #numDrawn = 0;
  #line = null;
  #last = null;

  constructor(element) {
    this.element = element;
    element.replaceChildren();
  }

  /** Draws what had come `until_s` seconds after the request. */
  draw(run, until_s) {
    if (!(run.deltas[this.#numDrawn]?.t <= until_s)) return;
    const follow = this.element.scrollHeight - this.element.scrollTop - this.element.clientHeight < 40;
    for (; run.deltas[this.#numDrawn]?.t <= until_s; this.#numDrawn++) this.#add(run.deltas[this.#numDrawn]);
    if (follow) this.element.scrollTop = this.element.scrollHeight;
  }

  #add({ text, origin }) {
    for (const line of text.split(/(?<=\n)/)) {
      this.#line ??= this.element.appendChild(document.createElement("div"));
      for (const piece of line.split(/(^\s+|\s*\n$)/)) if (piece) this.#mark(piece, piece.trim() && origin);
      if (line.endsWith("\n")) this.#line = this.#last = null;
    }
  }

  /** Line ends and indents stay outside the marked words: a marked indent would read as a ruled line. */
  #mark(piece, mark) {
    if (this.#last?.mark === mark) return this.#last.node.appendData(piece);
    const node = document.createTextNode(piece);
    this.#last = { mark, node };
    if (!mark) return this.#line.append(node);
    const span = document.createElement("span");
    span.className = mark;
    span.append(node);
    this.#line.append(span);
  }
}

/** One side of the race: its run, its text, its clock. */
class Lane {
  constructor(id) {
    this.element = $(id);
    [this.name, this.about, this.clock, this.bar, this.text] = ["h3", ".muted", ".clock", ".bar", ".text"].map((name) =>
      this.element.querySelector(name),
    );
  }

  open([name, model], run, empty) {
    this.run = run;
    this.text.dataset.empty = empty;
    this.name.textContent = name;
    this.about.textContent = model;
    this.rewind();
  }

  rewind() {
    this.view = new TextView(this.text);
  }

  draw(longest_s, now_s = Infinity) {
    const reached_s = Math.min(now_s, this.run.total_s);
    this.view.draw(this.run, now_s);
    this.clock.textContent = reached_s ? seconds(reached_s) : "–";
    this.bar.style.width = `${(100 * reached_s) / longest_s}%`;
    this.element.classList.toggle("live", this.run.isOpen || now_s < this.run.total_s);
  }
}

/** How much slower a race is shown that is over too soon to be seen; nice numbers, about four seconds. */
const slowdownOf = (longest_s) => niceAbove(Math.max(1, 2.5 / longest_s));

class Replay {
  #frame = null;

  constructor(lanes, longest_s, ended) {
    Object.assign(this, { lanes, longest_s, ended });
  }

  start() {
    const began_ms = performance.now();
    const perSecond = 1000 * slowdownOf(this.longest_s);
    for (const lane of this.lanes) lane.rewind();
    const draw = (now_ms) => {
      const now_s = Math.max(0, now_ms - began_ms) / perSecond;
      if (now_s >= this.longest_s) return this.end();
      for (const lane of this.lanes) lane.draw(this.longest_s, now_s);
      this.#frame = requestAnimationFrame(draw);
    };
    draw(began_ms);
  }

  end() {
    cancelAnimationFrame(this.#frame);
    for (const lane of this.lanes) lane.draw(this.longest_s);
    this.ended();
  }
}
