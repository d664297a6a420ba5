"""`/v1/vector_stores`: stores, their items, their files, and search.

As OpenAI defines it, with `items` beside its files: vectors, texts and images under ids of the
client's own. A store's model is chosen when it is made and stays.

Source: OpenAI API reference, "Vector stores", "Vector store files".
"""

from gateway.api.vector_stores.chunks import cut_chunks
from gateway.api.vector_stores.schemas import Deleted, ListQuery, Metadata
from gateway.api.vector_stores.stores import VectorStores

__all__ = ["Deleted", "ListQuery", "Metadata", "VectorStores", "cut_chunks"]
