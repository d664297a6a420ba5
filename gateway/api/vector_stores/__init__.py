"""`/v1/vector_stores`: stores, their items, their files, and search.

OpenAI's API, and `items` as an extension: vectors, texts and images with ids that the client chooses. The embedding
model of a store cannot be changed.

Source: OpenAI API reference, "Vector stores", "Vector store files".
"""

from gateway.api.vector_stores.schemas import Deleted, ListQuery, Metadata, PageQuery, cut_chunks
from gateway.api.vector_stores.stores import VectorStores

__all__ = ["Deleted", "ListQuery", "Metadata", "PageQuery", "VectorStores", "cut_chunks"]
