// Parses the server-sent events of a response body.

/** The data of each event, as it arrives. Comments (`: keep-alive`) are skipped. */
export async function* readEvents(body) {
  let rest = "";
  for await (const text of readText(body)) {
    const lines = (rest + text).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ")) yield line.slice("data: ".length);
    }
  }
}

/** The text of the body. Closes the connection if the consumer stops early. */
async function* readText(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
