// What has been said, and the request that it makes. Knows no HTTP and no page.

/** Questions with their answers; one without an answer (failed, stopped at once) is not told to the model again. */
export class Conversation {
  constructor({ id = toId(), exchanges = [] } = {}) {
    this.id = id;
    this.exchanges = exchanges;
  }

  /** The exchanges before one, or all of them. */
  before(exchange) {
    return exchange ? this.exchanges.slice(0, this.exchanges.indexOf(exchange)) : this.exchanges;
  }

  /** Take a question in place of `instead` and all that came after it, or at the end; returns its exchange. */
  add(question, instead = null) {
    if (instead) this.exchanges.length = this.exchanges.indexOf(instead);
    const exchange = { question, answer: "", note: "", isError: false, measured: null };
    this.exchanges.push(exchange);
    return exchange;
  }

  /** The messages that ask the last question, after all that was answered before. */
  toMessages(system) {
    const answered = this.exchanges.slice(0, -1).filter(({ answer }) => answer);
    const turns = answered.flatMap(({ question, answer }) => [
      toMessage(question),
      { role: "assistant", content: answer },
    ]);
    const opening = system ? [{ role: "system", content: system }] : [];
    return [...opening, ...turns, toMessage(this.exchanges.at(-1).question)];
  }
}

/** Unlike any other; `crypto.randomUUID` is there on https and localhost alone. */
function toId() {
  return [...crypto.getRandomValues(new Uint32Array(4))].map((word) => word.toString(36)).join("-");
}

/** `{text, images}` as a user's turn: images first, as models were trained. */
function toMessage({ text, images }) {
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: [...parts, { type: "text", text }] };
}
