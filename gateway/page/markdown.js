// Markdown as elements: what models write of CommonMark and of GitHub's tables. Text only ever becomes text nodes;
// markup, images and addresses other than http(s) stay the text that they are.

import { toCopyButton } from "./copy.js";

const MAX_DEPTH = 8; // of quotes, lists and emphasis in each other
const MAX_COLUMNS = 100;
const MAX_CELLS = 2000; // of one table
const MAX_BLOCKS = 2000; // of a text, and items of a list; what is beyond a bound is shown as text
const MAX_LINE = 2000; // of a heading, a rule or a table's second line: their patterns backtrack
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(\s+|$)/;
const TABLE_RULE = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;

// Every length is bounded, so that no text takes longer than its length allows.
const INLINE = new RegExp(
  [
    String.raw`\\(?<escaped>[!-/:-@[-\x60{-~])`,
    String.raw`(?<ticks>\x60{1,3})(?!\x60)(?<code>[^]{1,2000}?)(?<!\x60)\k<ticks>(?!\x60)`,
    String.raw`!?\[(?<label>[^[\]]{1,500})\]\((?<href>(?:[^\s()<>]|\([^\s()<>]{0,200}\)){1,2000})(?:\s+"[^"]{0,200}")?\)`,
    String.raw`(?<bare>https?:\/\/[^\s<>]{1,2000})`,
    String.raw`\*\*(?=\S)(?<strong>[^]{1,2000}?\*?)(?<=\S)\*\*`,
    String.raw`(?<!\w)__(?=\S)(?<strong2>[^]{1,2000}?)(?<=\S)__(?!\w)`,
    String.raw`\*(?=[^\s*])(?<em>[^*]{1,2000}?)(?<=\S)\*(?!\*)`,
    String.raw`(?<!\w)_(?=[^\s_])(?<em2>[^]{1,2000}?)(?<=\S)_(?!\w)`,
    String.raw`~~(?=\S)(?<del>[^]{1,2000}?)(?<=\S)~~`,
  ].join("|"),
  "g",
);

/** Shows a text that grows in `element`; blocks that are complete are left alone. */
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.sources = [];
  }

  show(text) {
    const blocks = splitBlocks(text.replaceAll("\r\n", "\n").split("\n"));
    const sources = blocks.map(({ lines }) => lines.join("\n"));
    let same = 0;
    while (same < sources.length && sources[same] === this.sources[same]) same++;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    this.element.append(...blocks.slice(same).map((block) => toBlock(block, 0)));
    this.sources = sources;
  }
}

/** Code in a frame with its language and a button that copies it. */
export function toCodeBlock(text, language = "") {
  const frame = create("div", "", "code");
  const head = create("div", "", "code-head");
  const pre = create("pre");
  pre.append(create("code", text));
  head.append(create("span", language, "muted"), toCopyButton("Copy code", () => text));
  frame.append(head, pre);
  return frame;
}

// --- blocks -------------------------------------------------------------------------------------------------------

/** The blocks of a text: `{kind, lines}`. */
function splitBlocks(lines) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (blocks.length === MAX_BLOCKS) {
      blocks.push({ kind: "text", lines: lines.slice(at) });
      break;
    }
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const kind = kindAt(lines, at);
    const end = ENDS[kind](lines, at);
    blocks.push({ kind, lines: lines.slice(at, end) });
    at = end;
  }
  return blocks;
}

function kindAt(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return "code";
  if (matches(HEADING, line)) return "heading";
  if (matches(RULE, line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  if (line.includes("|") && matches(TABLE_RULE, lines[at + 1] ?? "")) return "table";
  return "paragraph";
}

function matches(pattern, line) {
  return line.length <= MAX_LINE && pattern.test(line);
}

const ENDS = {
  heading: (lines, at) => at + 1,
  rule: (lines, at) => at + 1,
  quote: (lines, at) => endWhere(lines, at, (line) => !QUOTE.test(line)),
  table: (lines, at) => endWhere(lines, at, (line) => !line.includes("|")),
  paragraph: (lines, at) => endWhere(lines, at, (line, index) => !line.trim() || kindAt(lines, index) !== "paragraph"),
  code(lines, at) {
    const [, fence] = FENCE.exec(lines[at]);
    const closes = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
    return Math.min(lines.length, endWhere(lines, at, closes) + 1);
  },
  list(lines, at) {
    const isOrdered = /\d/.test(lines[at].trim()[0]);
    let wasBlank = false;
    const end = endWhere(lines, at, (line, index) => {
      if (!line.trim()) return (wasBlank = true) && false;
      const isIndented = /^ {2}|^\t/.test(line);
      const isItem = ITEM.test(line) && !matches(RULE, line) && /\d/.test(line.trim()[0]) === isOrdered;
      const goesOn = isIndented || isItem || (!wasBlank && kindAt(lines, index) === "paragraph");
      wasBlank = false;
      return !goesOn;
    });
    return end;
  },
};

function endWhere(lines, at, isEnd) {
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end], end)) end++;
  return end;
}

function toBlock({ kind, lines }, depth) {
  if (depth > MAX_DEPTH) return MAKERS.text(lines);
  return MAKERS[kind](lines, depth);
}

const MAKERS = {
  rule: () => create("hr"),
  text: (lines) => create("p", lines.join("\n")),
  heading([line], depth) {
    const [, marks, text] = HEADING.exec(line);
    return withInline(create(`h${Math.min(6, marks.length + 2)}`), text, depth); // below the page's own
  },
  quote: (lines, depth) => withBlocks(create("blockquote"), lines.map((line) => line.replace(QUOTE, "")), depth),
  paragraph: (lines, depth) => withInline(create("p"), lines.map((line) => line.trim()).join("\n"), depth),
  code(lines) {
    const [, fence, language] = FENCE.exec(lines[0]);
    const isClosed = lines.length > 1 && lines.at(-1).trim().startsWith(fence);
    return toCodeBlock(lines.slice(1, isClosed ? -1 : undefined).join("\n"), language);
  },
  table(lines, depth) {
    const numColumns = lines[1].split("|", MAX_COLUMNS + 3).length;
    if (numColumns > MAX_COLUMNS + 2) return MAKERS.text(lines);
    const numRows = Math.floor(MAX_CELLS / numColumns);
    const scroll = create("div", "", "table");
    const table = create("table");
    const sides = splitRow(lines[1]).map((cell) => (cell.endsWith(":") ? (cell[0] === ":" ? "center" : "right") : "left"));
    const toRow = (line, name) => {
      const row = create("tr");
      const cells = splitRow(line);
      row.append(
        ...sides.map((side, index) => {
          const cell = withInline(create(name), cells[index] ?? "", depth);
          cell.style.textAlign = side;
          return cell;
        }),
      );
      return row;
    };
    const head = create("thead");
    const body = create("tbody");
    head.append(toRow(lines[0], "th"));
    body.append(...lines.slice(2, numRows + 2).map((line) => toRow(line, "td")));
    table.append(head, body);
    scroll.append(table);
    if (lines.length > numRows + 2) scroll.append(MAKERS.text(lines.slice(numRows + 2)));
    return scroll;
  },
  list(lines, depth) {
    const first = ITEM.exec(lines[0])[2];
    const list = create(/\d/.test(first) ? "ol" : "ul");
    if (/\d/.test(first)) list.start = parseInt(first, 10);
    const items = splitItems(lines);
    const rest = items.splice(MAX_BLOCKS).flat();
    if (rest.length > 0) items.push(["", rest.join("\n")]);
    for (const item of items) {
      const element = create("li");
      const blocks = splitBlocks(item);
      const [opening] = blocks;
      if (opening?.kind === "paragraph") withInline(element, opening.lines.map((line) => line.trim()).join("\n"), depth);
      else if (opening) element.append(toBlock(opening, depth + 1));
      element.append(...blocks.slice(1).map((block) => toBlock(block, depth + 1)));
      list.append(element);
    }
    return list;
  },
};

/** The lines of each item, without its mark and indent. */
function splitItems(lines) {
  const items = [];
  let indent = 0;
  for (const line of lines) {
    const mark = ITEM.exec(line);
    const isInner = items.length > 0 && mark && mark[1].length >= Math.min(indent, 2);
    if (mark && !isInner) {
      indent = mark[0].trimEnd().length + 1;
      items.push([line.slice(mark[0].length)]);
    } else {
      const margin = Math.min(indent, /^\s*/.exec(line)[0].length);
      items.at(-1).push(line.slice(margin));
    }
  }
  return items;
}

function splitRow(line) {
  const cells = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/);
  return cells.map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function withBlocks(element, lines, depth) {
  element.append(...splitBlocks(lines).map((block) => toBlock(block, depth + 1)));
  return element;
}

// --- within a line ------------------------------------------------------------------------------------------------

function withInline(element, text, depth) {
  let at = 0;
  for (const match of depth > MAX_DEPTH ? [] : text.matchAll(INLINE)) {
    element.append(text.slice(at, match.index), toInline(match, depth + 1));
    at = match.index + match[0].length;
  }
  element.append(text.slice(at));
  return element;
}

function toInline({ 0: source, groups }, depth) {
  const { escaped, code, label, href, bare, strong, strong2, em, em2, del } = groups;
  if (escaped) return escaped;
  if (code) return create("code", code.length > 2 && /^ .* $/.test(code) ? code.slice(1, -1) : code);
  if (label) return toLink(href, source, (link) => withInline(link, label, depth));
  if (bare) return toBareLink(bare);
  if (strong ?? strong2) return withInline(create("strong"), strong ?? strong2, depth);
  if (em ?? em2) return withInline(create("em"), em ?? em2, depth);
  return withInline(create("del"), del, depth);
}

/** An address in a text, without the dot that ends the sentence. */
function toBareLink(text) {
  const end = text.includes("(") ? /[.,;:!?'"*_]+$/ : /[.,;:!?'"*_)\]]+$/;
  const address = text.replace(end, "");
  const whole = document.createDocumentFragment();
  whole.append(toLink(address, address, (link) => link.append(address)), text.slice(address.length));
  return whole;
}

/** A link that opens elsewhere and tells nothing of this page; or `source` where it leads nowhere safe. */
function toLink(href, source, fill) {
  const url = URL.parse(href);
  if (!url || !["http:", "https:"].includes(url.protocol)) return document.createTextNode(source);
  const link = create("a");
  link.href = url.href;
  link.title = url.href;
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
  fill(link);
  return link;
}

function create(name, text = "", className = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}
