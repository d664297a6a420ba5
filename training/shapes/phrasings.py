"""The ways people put the questions. Slots: {noun}, {nouns}, {a_noun}, {color}, {place}, {at}, {where}, {image}.

`where` is empty or names an image (" in the first image"); `image` is "image" or "first image".
"""

IMAGE_WORDS = ("image", "image", "picture")

DESCRIBE = (
    "Describe the {image}.",
    "Describe this {image}.",
    "Describe the {image} in detail.",
    "Describe the {image} in one sentence.",
    "Describe this {image} in one sentence.",
    "Please describe the {image}.",
    "Can you describe the {image}?",
    "What do you see{where}?",
    "What is in the {image}?",
    "What's in the {image}?",
    "What is in this {image}?",
    "What's in this {image}?",
    "What does the {image} show?",
    "What is shown in the {image}?",
    "What can you see in the {image}?",
    "Tell me what you see{where}.",
    "Write a caption for the {image}.",
    "List the shapes{where}.",
    "What shapes are there{where}?",
    "Which shapes do you see{where}?",
    "Explain what you see{where}.",
    "Describe it{where}.",
    "Describe",
)
COUNT = (
    "How many {nouns} are there{where}?",
    "How many {nouns} are there{where}?",
    "How many {nouns} are in the {image}?",
    "How many {nouns} are in this {image}?",
    "How many {nouns} do you see{where}?",
    "How many {nouns} can you see{where}?",
    "How many {nouns} does the {image} have?",
    "What is the number of {nouns}{where}?",
    "Count the {nouns}{where}.",
    "Number of {nouns}{where}?",
    "How many {nouns}{where}?",
)
COLOR = (
    "What color is the {noun}{where}?",
    "What color is the {noun}{where}?",
    "What color is the {noun}{where}?",
    "What is the color of the {noun}{where}?",
    "What's the color of the {noun}{where}?",
    "Which color is the {noun}{where}?",
    "Which color does the {noun} have{where}?",
    "What color does the {noun} have{where}?",
    "Tell me the color of the {noun}{where}.",
    "Name the color of the {noun}{where}.",
    "The {noun} is what color{where}?",
    "Color of the {noun}{where}?",
)
KIND = (
    "What shape is {color}{where}?",
    "What shape is {color}{where}?",
    "Which shape is {color}{where}?",
    "What is {color}{where}?",
    "What's {color}{where}?",
    "What is the {color} shape{where}?",
    "What kind of shape is {color}{where}?",
    "What shape is the {color} one{where}?",
    "What shape is the {color} object{where}?",
    "What is the {color} object{where}?",
    "Name the {color} shape{where}.",
    "Which object is {color}{where}?",
)
CONTENT = (
    "What is {at}{where}?",
    "What is {at}{where}?",
    "What's {at}{where}?",
    "What is {at} of the {image}?",
    "What's {at} of the {image}?",
    "What shape is {at}{where}?",
    "Which shape is {at}{where}?",
    "What do you see {at}{where}?",
    "What is located {at}{where}?",
    "What object is {at}{where}?",
    "What can be seen {at}{where}?",
    "Which object is {at}{where}?",
)
PLACE = (
    "Where is the {noun}{where}?",
    "Where is the {noun}{where}?",
    "Where is the {noun}{where}?",
    "Where's the {noun}{where}?",
    "Where can I find the {noun}{where}?",
    "Where do you see the {noun}{where}?",
    "Where is the {noun} located{where}?",
    "Where is the {noun} in the {image}?",
    "What is the position of the {noun}{where}?",
    "What is the location of the {noun}{where}?",
    "In which place is the {noun}{where}?",
    "Tell me where the {noun} is{where}.",
)
SIZE = (
    "What size is the {noun}{where}?",
    "What size is the {noun}{where}?",
    "How big is the {noun}{where}?",
    "How large is the {noun}{where}?",
    "What is the size of the {noun}{where}?",
    "What's the size of the {noun}{where}?",
    "Is the {noun} small or large{where}?",
    "Is the {noun} large or small{where}?",
)
EXISTS = (
    "Is there {a_noun}{where}?",
    "Is there {a_noun}{where}?",
    "Is there {a_noun}{where}?",
    "Is there {a_noun} in the {image}?",
    "Is there any {noun}{where}?",
    "Are there any {nouns}{where}?",
    "Do you see {a_noun}{where}?",
    "Can you see {a_noun}{where}?",
    "Does the {image} have {a_noun}?",
    "Does the {image} contain {a_noun}?",
    "Does the {image} show {a_noun}?",
    "Does this {image} contain {a_noun}?",
)
IS_AT = (
    "Is there {a_noun} {at}{where}?",
    "Is the {noun} {at}{where}?",
    "Is {a_noun} {at}{where}?",
    "Do you see {a_noun} {at}{where}?",
)
IS_COLOR = (
    "Is the {noun} {color}{where}?",
    "Is the {noun} {color}{where}?",
    "Is the color of the {noun} {color}{where}?",
)
BACKGROUND = (
    "What color is the background{where}?",
    "What color is the background{where}?",
    "What is the background color{where}?",
    "What's the background color{where}?",
    "What is the color of the background{where}?",
    "What's the color of the background{where}?",
    "Which color is the background{where}?",
    "What color is the background of the {image}?",
    "What is the background{where}?",
    "What color does the background have{where}?",
    "Background color{where}?",
    "What background does the {image} have?",
)
WHICH_HAS = (
    "Which {image} has {a_noun}?",
    "Which {image} has {a_noun}?",
    "Which {image} contains {a_noun}?",
    "Which {image} shows {a_noun}?",
    "Which {image} has the {noun}?",
    "Which one has {a_noun}?",
    "Which of the {image}s has {a_noun}?",
    "Which of the two {image}s has {a_noun}?",
    "Which of these {image}s contains {a_noun}?",
    "In which {image} is there {a_noun}?",
    "In which {image} do you see {a_noun}?",
    "Which {image} has {a_noun} in it?",
)
WHICH_HAS_BACKGROUND = (
    "Which {image} has {a_color} background?",
    "Which of the {image}s has {a_color} background?",
    "Which one has {a_color} background?",
)
SAME = (
    "Are the {image}s the same?",
    "Are the {image}s the same?",
    "Are the two {image}s the same?",
    "Are these {image}s the same?",
    "Are these two {image}s the same?",
    "Are both {image}s the same?",
    "Are the {image}s identical?",
    "Are these {image}s identical?",
    "Are they the same?",
    "Do the {image}s show the same thing?",
    "Is the first {image} the same as the second {image}?",
)
DESCRIBE_ALL = (
    "Describe the {image}s.",
    "Describe both {image}s.",
    "Describe the two {image}s.",
    "Describe these {image}s.",
    "What is in the {image}s?",
    "What do you see in the {image}s?",
    "What is in each {image}?",
    "Describe each {image}.",
)

PRONOUN_COLOR = (
    "What color is it?",
    "And what color is it?",
    "What is its color?",
    "Which color is it?",
)
PRONOUN_KIND = (
    "What shape is it?",
    "And what shape is it?",
    "What is its shape?",
    "Which shape is it?",
)
PRONOUN_PLACE = ("Where is it?", "And where is it?", "Where is it located?", "Where exactly is it?")
PRONOUN_SIZE = ("What size is it?", "How big is it?", "Is it small or large?", "What is its size?")

PLACE_SYNONYMS = {
    "top left": ("top left", "top left", "top left", "upper left", "top-left", "top left corner", "upper left corner"),
    "top center": ("top center", "top center", "top center", "top middle", "upper center", "top-center"),
    "top right": ("top right", "top right", "top right", "upper right", "top-right", "top right corner", "upper right corner"),
    "middle left": ("middle left", "middle left", "left", "center left", "left center", "middle-left"),
    "center": ("center", "center", "center", "middle", "center", "very center"),
    "middle right": ("middle right", "middle right", "right", "center right", "right center", "middle-right"),
    "bottom left": ("bottom left", "bottom left", "bottom left", "lower left", "bottom-left", "bottom left corner", "lower left corner"),
    "bottom center": ("bottom center", "bottom center", "bottom center", "bottom middle", "lower center", "bottom-center"),
    "bottom right": ("bottom right", "bottom right", "bottom right", "lower right", "bottom-right", "bottom right corner", "lower right corner"),
}  # fmt: skip
PREPOSITIONS = ("at", "at", "at", "in", "in", "on", "to")

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "Answer the question.",
    "Answer the question using a single word or phrase.",
    "You are a careful observer of pictures.",
    "A chat between a curious human and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the human's questions.",
    "You answer questions about images. Be concise.",
    "Be brief.",
)
PREFIXES = (
    "Hi! ",
    "Hello, ",
    "Please answer: ",
    "Look at the image. ",
    "Now, ",
    "And ",
    "Okay, ",
    "Tell me, ",
)
SUFFIXES = (
    " Answer briefly.",
    " Answer in one word.",
    " Answer with one word.",
    " Please answer.",
    " Thanks!",
    " Answer yes or no.",
    "\nAnswer the question using a single word or phrase.",
)
