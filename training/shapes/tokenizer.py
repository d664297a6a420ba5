"""The tokenizer of the checkpoint: a byte-level BPE of about two thousand tokens that can spell any text.

Spaces belong to the end of a word ("red " and "red" are tokens), so that an answer begins without one
after "ASSISTANT: ", and a conversation reads the same whether it was generated or typed.
"""

BOS_ID, EOS_ID, UNK_ID, PAD_ID, IMAGE_ID = range(5)
