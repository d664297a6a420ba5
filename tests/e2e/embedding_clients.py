"""Other people's clients of OpenAI's embeddings, in an environment of their own: prints their vectors as JSON.

Arguments: the client, our address, a model. Texts come in as JSON: documents, and one query.
"""

import json
import sys


def langchain(url, model, documents, query):
    from langchain_openai import OpenAIEmbeddings  # noqa: PLC0415

    # Its own way to cut texts sends ids of OpenAI's tokenizer, which are other words here.
    client = OpenAIEmbeddings(
        model=model, base_url=url, api_key="unused", check_embedding_ctx_length=False
    )
    return [*client.embed_documents(documents), client.embed_query(query)]


def llama_index(url, model, documents, query):
    from llama_index.embeddings.openai import OpenAIEmbedding  # noqa: PLC0415

    client = OpenAIEmbedding(model_name=model, api_base=url, api_key="unused")
    return [*client.get_text_embedding_batch(documents), client.get_query_embedding(query)]


if __name__ == "__main__":
    given = json.load(sys.stdin)
    ask = {"langchain": langchain, "llama_index": llama_index}[sys.argv[1]]
    print(json.dumps(ask(*sys.argv[2:], given["documents"], given["query"])))
