// Reads Markdown that is still being written: what cannot change any more is read once.

import { CLOSES, OPENS } from "./math.js";

const MOST_TAIL = 4_000; // characters that are read anew with each frame

/**
 * The text so far in chunks that are settled and a tail that is not. Text ends a chunk where a blank line is followed by
 * one that belongs to no list or table; a tail that goes on for longer is cut at a line, in code with its fence again. Nothing is cut
 * within a formula that stands in lines of its own, but for its length.
 */
export class Reading {
  /** `layOut(text, level)` makes `{elements, level}`: what is shown, and the level of the last heading. */
  constructor(layOut) {
    this.layOut = layOut;
    this.chunks = []; // what is shown of each
    this.level = 1;
    this.start = 0; // of the tail
    this.at = 0; // of the first line that is not whole yet
    this.isAfterBlank = false;
    this.fence = null; // of the code that is open: its mark, and its line
    this.formula = null; // what ends the one that is open
    this.reopens = ""; // what the tail has before it: the line that opens the code it is in
  }

  /** Take the text as it has become, and return the tail. */
  take(text) {
    for (;;) {
      if (this.isAfterBlank && text.length > this.at) {
        this.isAfterBlank = false;
        if (/[^\s\d*+>|-]/.test(text[this.at])) this.settle(text);
      }
      const newline = text.indexOf("\n", this.at);
      if (newline === -1) break;
      this.line(text.slice(this.at, newline));
      this.at = newline + 1;
      if (this.at - this.start > MOST_TAIL) this.settle(text);
    }
    if (text.length - this.at > MOST_TAIL) {
      this.at = text.length; // a line without an end
      this.settle(text);
    }
    return this.reopens + text.slice(this.start);
  }

  line(line) {
    const mark = /^ {0,3}(`{3,}|~{3,})/.exec(line)?.[1];
    if (mark && this.fence === null) this.fence = { mark, line };
    else if (mark && mark[0] === this.fence?.mark[0] && mark.length >= this.fence.mark.length) this.fence = null;
    if (this.fence === null) this.formulaIn(line);
    this.isAfterBlank = this.fence === null && this.formula === null && line.trim() === "";
  }

  formulaIn(line) {
    const mark = this.formula === null ? OPENS.exec(line)?.[1] : null;
    const rest = mark ? line.slice(line.indexOf(mark) + mark.length) : line;
    if (mark) this.formula = CLOSES[mark];
    if (this.formula !== null && rest.includes(this.formula)) this.formula = null;
  }

  /** Read what stands before the present line for the last time. */
  settle(text) {
    if (this.at === this.start) return;
    const { elements, level } = this.layOut(this.reopens + text.slice(this.start, this.at), this.level);
    this.chunks.push(elements);
    this.level = level;
    this.start = this.at;
    this.reopens = this.fence ? `${this.fence.line}\n` : "";
  }
}
