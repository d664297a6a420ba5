// Renders the Markdown of answers: marked creates tokens, and this file creates DOM nodes. HTML, images and URLs other
// than http(s) are shown as text, and so is everything beyond a limit.

import { toCopyButton } from "./copy.js";
import { Lexer, Tokenizer } from "./marked.js";

const MAX_DEPTH = 8; // maximum nesting of quotes, lists and emphasis
const MAX_COLUMNS = 100;
const MAX_CELLS = 2000; // maximum cells of one table
const MAX_BLOCKS = 2000; // maximum blocks of a text, and items of a list
const MAX_INLINE = 5000; // maximum characters of a paragraph, heading or cell, because marked takes quadratic time
const MAX_LINE = 5000; // maximum characters of a line, because marked recurses for each block marker of a line
const MAX_LINES = 5000;

/** Shows a growing text in `element`. Unchanged blocks are not rendered again. */
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.sources = [];
  }

  show(text) {
    const { lexer, blocks } = parse(text);
    const sources = blocks.map(({ type, raw }) => type + raw);
    let same = 0;
    while (same < sources.length && sources[same] === this.sources[same]) same++;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    const maker = new NodeMaker(lexer);
    this.element.append(...blocks.slice(same).map((block) => maker.toBlock(block, 0)));
    this.sources = sources;
  }
}

/** A code block with its language and a copy button. */
export function toCodeBlock(text, language = "") {
  const pre = create("pre", create("code", text));
  const head = create("div", create("span", language));
  head.className = "code-head";
  head.firstChild.className = "muted";
  head.append(toCopyButton("Copy code", () => text));
  const frame = create("div", head, pre);
  frame.className = "code";
  return frame;
}

/** marked's tokenizer, with tables of bounded size. */
class BoundedTokenizer extends Tokenizer {
  table(source) {
    const numColumns = source.split("\n", 2)[1]?.split("|", MAX_COLUMNS + 3).length ?? 0;
    if (numColumns > MAX_COLUMNS + 2) return undefined;
    const numLines = Math.floor(MAX_CELLS / Math.max(1, numColumns)) + 2;
    return super.table(source.split("\n", numLines).join("\n"));
  }
}

/** Parse a text into blocks. The returned lexer has the link definitions of the text. */
function parse(text) {
  const lexer = new Lexer({ gfm: true, tokenizer: new BoundedTokenizer() });
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  const longest = lines.findIndex((line) => line.length > MAX_LINE);
  const numLines = longest < 0 ? MAX_LINES : Math.min(MAX_LINES, longest);
  const rest = lines.splice(numLines).join("\n");
  const beyond = rest.trim() ? [{ type: "beyond", raw: rest }] : [];
  try {
    const found = lexer.blockTokens(lines.join("\n")).filter(({ type }) => type !== "space" && type !== "def");
    return { lexer, blocks: [...bounded(found), ...beyond] };
  } catch (error) {
    if (error instanceof RangeError) return { lexer, blocks: [{ type: "beyond", raw: text }] }; // stack overflow
    throw error;
  }
}

/** At most `MAX_BLOCKS` tokens. The last one contains the source text of all further tokens. */
function bounded(tokens) {
  if (tokens.length <= MAX_BLOCKS) return tokens;
  const rest = tokens.splice(MAX_BLOCKS - 1).map(({ raw }) => raw);
  return [...tokens, { type: "beyond", raw: rest.join("\n") }];
}

class NodeMaker {
  constructor(lexer) {
    this.lexer = lexer;
  }

  toBlock(token, depth) {
    const make = depth > MAX_DEPTH ? undefined : this[token.type];
    return make ? make.call(this, token, depth) : create("p", token.raw.trimEnd());
  }

  hr = () => create("hr");
  code = ({ text, lang }) => toCodeBlock(text, lang);
  heading = ({ depth: level, text }, depth) => create(`h${Math.min(6, level + 2)}`, ...this.toInline(text, depth)); // below the headings of the page
  paragraph = ({ text }, depth) => create("p", ...this.toInline(text, depth));
  blockquote = ({ tokens }, depth) => create("blockquote", ...this.toBlocks(tokens, depth));

  list({ ordered, start, items }, depth) {
    const list = create(ordered ? "ol" : "ul");
    if (ordered) list.start = start;
    list.append(...bounded(items).map((item) => this.toItem(item, depth)));
    return list;
  }

  toItem({ tokens, raw }, depth) {
    if (!tokens) return create("li", raw);
    const parts = tokens.flatMap((token) =>
      token.type === "text" ? this.toInline(token.text, depth) : this.toBlocks([token], depth),
    );
    return create("li", ...parts);
  }

  table({ header, align, rows }, depth) {
    const toRow = (cells, name) =>
      create(
        "tr",
        ...cells.map(({ text }, index) => {
          const cell = create(name, ...this.toInline(text, depth));
          cell.style.textAlign = align[index] ?? "left";
          return cell;
        }),
      );
    const head = create("thead", toRow(header, "th"));
    const scroll = create("div", create("table", head, create("tbody", ...rows.map((row) => toRow(row, "td")))));
    scroll.className = "table";
    return scroll;
  }

  toBlocks(tokens, depth) {
    return tokens.filter(({ type }) => type !== "space").map((token) => this.toBlock(token, depth + 1));
  }

  /** The nodes of a line or paragraph. */
  toInline(text, depth) {
    if (text.length > MAX_INLINE) return [text];
    return this.toNodes(this.lexer.inlineTokens(text), depth);
  }

  toNodes(tokens, depth) {
    return tokens.map((token) => {
      if (depth > MAX_DEPTH) return token.raw;
      const inner = () => this.toNodes(token.tokens, depth + 1);
      switch (token.type) {
        case "strong":
        case "em":
        case "del":
          return create(token.type, ...inner());
        case "codespan":
          return create("code", token.text);
        case "br":
          return create("br");
        case "link":
          return toLink(token.href, inner) ?? token.raw;
        case "escape":
          return token.text;
        default:
          return token.raw;
      }
    });
  }
}

/** A link that opens a new tab without referrer; undefined if the URL is not http(s). */
function toLink(href, inner) {
  const url = URL.parse(href);
  if (!url || !["http:", "https:"].includes(url.protocol)) return undefined;
  const link = create("a", ...inner());
  link.href = url.href;
  link.title = url.href;
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
  return link;
}

function create(name, ...children) {
  const element = document.createElement(name);
  element.append(...children);
  return element;
}
