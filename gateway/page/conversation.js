// What has been said, and the request that it makes. Knows no HTTP and no page.

/** Questions with their answers; one without an answer (failed, stopped at once) is not told to the model again. */
export class Conversation {
  constructor() {
    this.exchanges = [];
  }

  /** The messages that ask `question`, after all that was answered before. */
  toMessages(question, system) {
    const turns = this.exchanges.flatMap(({ question: asked, answer }) => [
      toMessage(asked),
      { role: "assistant", content: answer },
    ]);
    const opening = system ? [{ role: "system", content: system }] : [];
    return [...opening, ...turns, toMessage(question)];
  }

  remember(question, answer) {
    if (answer) this.exchanges.push({ question, answer });
  }
}

/** `{text, images}` as a user's turn: images first, as models were trained. */
function toMessage({ text, images }) {
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: [...parts, { type: "text", text }] };
}
