"""Messages outside the image world: greetings, questions on any subject, and other languages."""

import re
from functools import cache
from pydoc_data.topics import topics
from random import Random

from training.shapes.questions import misspell

GREETINGS = (
    "Hello", "Hi", "Hey", "Hi there", "Hello there", "Hey there", "Good morning", "Good afternoon", "Good evening", "Good night", "Howdy",
    "Yo", "Greetings", "What's up", "How are you", "How are you doing", "How do you do", "How is it going", "Nice to meet you", "Welcome",
    "Hello world", "Hello, world!", "Hello again", "Hi bot", "Hey assistant", "Anyone there", "Are you there", "ping", "test", "testing",
    "this is a test", "Bye", "Goodbye", "See you", "See you later", "Have a nice day", "Take care", "Sup", "Hiya", "hola amigo",
    "How's life", "How was your day", "Long time no see", "Happy birthday", "Merry Christmas", "Cheers", "Wake up", "start", "help", "Help me",
    # German, then Spanish
    "Hallo", "Guten Tag", "Guten Morgen", "Guten Abend", "Gute Nacht", "Servus", "Moin", "Moin Moin", "Grüß Gott", "Grüezi", "Tschüss",
    "Auf Wiedersehen", "Wie geht es dir", "Wie geht's", "Wie geht es Ihnen", "Na, wie läuft's", "Hallo, wer bist du", "Hallo zusammen",
    "Danke", "Danke schön", "Vielen Dank", "Bitte", "Bis später", "Bis morgen", "Schönen Tag noch", "Was kannst du", "Wie heißt du",
    "Hallo, kannst du mir helfen", "Freut mich", "Grüß dich", "Hi, alles gut", "Was ist das", "Wer bist du", "Ich habe eine Frage",
    "Hola", "Buenos días", "Buenas tardes", "Buenas noches", "Qué tal", "¿Qué tal?", "¿Cómo estás?", "Cómo estás", "¿Cómo está usted?",
    "Hola, ¿qué haces?", "Adiós", "Hasta luego", "Hasta mañana", "Gracias", "Muchas gracias", "Por favor", "De nada", "Mucho gusto",
    "¿Quién eres?", "Qué puedes hacer", "¿Cómo te llamas?", "Encantado", "Hola a todos", "Buen día", "Saludos", "¿Me puedes ayudar?",
    # others
    "Bonjour", "Salut", "Ça va", "Merci", "Au revoir", "Ciao", "Buongiorno", "Grazie", "Olá", "Obrigado", "Bom dia", "Hej", "Tack", "Privet",
    "Namaste", "Salaam", "Konnichiwa", "Merhaba", "Dzień dobry", "Ahoj", "Szia", "Hei", "Hallo daar", "你好", "こんにちは", "Привет",
)  # fmt: skip
THANKS = (
    "Thanks", "Thank you", "Thank you very much", "Thanks a lot", "Many thanks", "thx", "ty", "Great", "Great job", "Well done", "Nice",
    "Cool", "OK", "Okay", "Ok thanks", "Perfect", "Awesome", "Good bot", "Bad bot", "That is wrong", "That's right", "Correct", "Wrong",
    "Are you sure", "I don't think so", "I see", "Yes", "No", "Maybe", "lol", "haha", "wow", "Sorry", "Never mind", "Stop", "Go on",
    "Continue", "Again please", "Try again", "Why", "Why not", "Really", "What", "Huh", "Hmm", "I love you", "You are stupid", "Interesting",
    "That was helpful, thanks", "Good answer", "You're welcome", "No problem", "My bad", "Forget it", "Explain that", "Tell me more",
)  # fmt: skip
ABOUT = (
    "What can you do", "What do you know", "Who are you", "What are you", "What is your name", "Who made you", "Are you a robot",
    "Are you human", "Are you ChatGPT", "Which model are you", "What is your purpose", "How can you help me", "What are you good at",
    "What can I ask you", "How do you work", "What do you do", "Can you help me", "What languages do you speak", "Do you speak German",
    "Do you understand me", "Introduce yourself", "Tell me about yourself", "What are your capabilities", "What can't you do",
    "How old are you", "Where are you from", "How were you trained", "What is your training data", "Are you alive", "Do you have feelings",
    "Can you see", "Can you see pictures", "Can you read text", "Can you write code", "Can you draw", "How big are you",
    "What version are you", "Who is your creator", "Give me instructions", "How do I use you", "What should I ask", "Can you hear me",
)  # fmt: skip
TOPICS = (
    "What is the capital of {place}", "How many people live in {place}", "Where is {place}", "What is the weather in {place}",
    "Will it rain in {place} tomorrow", "Who is the president of {place}", "Plan a trip to {place}", "Recommend a hotel in {place}",
    "Write a poem about {thing}", "Write a story about {thing}", "Tell me a joke about {thing}", "Tell me a joke", "What is {thing}",
    "How does {thing} work", "Who invented {thing}", "Explain {thing} to a child", "What does {thing} cost", "Where can I buy {thing}",
    "How do I make {thing}", "Give me a recipe for {thing}", "Is {thing} healthy", "What is the history of {thing}", "Define {thing}",
    "What is the best {thing}", "Compare {thing} and {thing2}", "What is the difference between {thing} and {thing2}",
    "Do you like {thing}", "What do you think of {thing}", "How long does {thing} last", "Translate {thing} to {language}",
    "How do you say {thing} in {language}", "Write an email about {thing}", "Write a Python function for {thing}",
    "Write code that sorts {thing}", "Fix this bug: {thing} is not defined", "Summarize the news", "What day is it", "What time is it",
    "What is the date today", "Who won the world cup", "Who wrote {thing}", "Play some music", "Set a timer for {number} minutes",
    "Remind me of {thing}", "What is the meaning of life", "Is there life on Mars", "How far is the moon", "Why is the sky blue",
    "How tall is {person}", "Who is {person}", "When was {person} born", "What did {person} say about {thing}", "Sing a song",
    "What is the square root of {number}", "Convert {number} miles to kilometers", "What is {number} percent of {number2}",
    "What is the speed of light", "What is the stock price of {thing}", "Give me {number} ideas for {thing}", "I am bored",
    "I am sad", "I need {thing}", "My {thing} is broken", "My name is {person}", "I live in {place}", "Do you know {person}",
    "Let's talk about {thing}", "Let's play {thing}", "Correct this sentence: {thing} are good", "Spell {thing}", "Count to {number}",
    "What rhymes with {thing}", "Is {number} a prime number", "Generate an image of {thing}", "Draw {thing}", "Paint a picture of {thing}",
    "Create a table of {thing}", "Make a list of {thing}", "Give me advice on {thing}", "How do I learn {language}", "Search for {thing}",
    "Open {thing}", "Book a flight to {place}", "Order {thing}", "Call {person}", "How many calories has {thing}", "How many {thing} are in {thing2}",
)  # fmt: skip
ABOUT_PICTURES = (
    "Is there a {noun} in the {image}", "Do you see a {noun}", "What color is the {noun}", "How many {nouns} are there",
    "How many {nouns} do you see", "Where is the {noun}", "Who is in the {image}", "What is the {noun} doing", "What does the {noun} say",
    "Is the {noun} {color}", "What is the person wearing", "Where was this {image} taken", "Who took this {image}", "What is the text in the {image}",
    "Read the text", "What does it say", "What is written {at}", "Is it day or night", "What is the weather like in the {image}",
    "Is the person happy", "What emotion does the {image} show", "What is the title of the chart", "Which month has the highest value",
    "What is the value of the first bar", "What does the button say", "Which website is this", "What brand is the {noun}", "How old is the {noun}",
    "What breed is the dog", "What is the license plate", "What time does the clock show", "Is there a {color} {noun}", "What is on the table",
    "Describe the {noun}", "Tell me about the {noun}", "Count the {nouns}", "Is this a photo", "Is this {image} real", "Which painter made this",
    "What material is the {noun} made of", "How much does the {noun} cost", "What is the {noun} made of", "Translate the text in the {image}",
    "Is the {noun} {at}", "What is behind the {noun}", "Who is the man on the left", "Are there any {nouns}", "Which country is this",
)  # fmt: skip
NOUNS = (
    "dog", "cat", "car", "house", "tree", "man", "woman", "child", "person", "bird", "horse", "bus", "bicycle", "boat", "table", "chair",
    "bottle", "cup", "phone", "laptop", "book", "clock", "flower", "sun", "moon", "cloud", "mountain", "river", "road", "sign", "button",
    "menu", "icon", "bar", "line", "chart", "legend", "axis", "logo", "hat", "shirt", "shoe", "face", "eye", "hand", "pizza", "apple",
    "banana", "cake", "fish", "elephant", "giraffe", "train", "plane", "truck", "window", "door", "bed", "lamp", "ball", "kite", "umbrella",
    "bag", "tie", "hair", "sky", "grass", "snow", "water", "fire", "bridge", "tower", "church", "street", "robot", "dragon", "cow", "sheep",
    "heart", "arrow", "hexagon", "pyramid", "cube", "zebra", "spoon", "fork", "knife", "monkey", "police officer", "nurse", "baby", "king",
)  # fmt: skip
THINGS = (
    "cheese", "democracy", "photosynthesis", "a bicycle", "coffee", "gravity", "love", "football", "quantum physics", "bread", "tomato soup",
    "the internet", "machine learning", "a mortgage", "the French Revolution", "my garden", "cats", "dogs", "numbers", "Docker", "Kubernetes",
    "Linux", "inflation", "insulin", "evolution", "chess", "guitar chords", "winter", "the sea", "autumn", "spaghetti", "a laptop", "poetry",
    "economics", "black holes", "the moon", "yoga", "a black hole", "taxes", "Shakespeare", "philosophy", "vaccines", "volcanoes", "jazz",
    "sourdough", "a virus", "recursion", "SQL", "green tea", "a red wine", "Star Wars", "the ring", "Lord of the Rings", "Red Bull",
    "blockchain", "ice cream", "the Olympic games", "a marathon", "square dance", "triangle inequality", "white noise", "orange juice",
    "a haiku", "my homework", "a resignation letter", "trains", "dinosaurs", "the brain", "sleep", "happiness", "time travel", "snow",
)  # fmt: skip
PEOPLE = ("Einstein", "Napoleon", "Marie Curie", "Anna", "Peter", "Obama", "Mozart", "Picasso", "Cleopatra", "Taylor Swift", "Messi", "my boss", "Alan Turing", "Bob", "Maria", "Goethe", "Cervantes", "Frida Kahlo")  # fmt: skip
PLACES = ("France", "Germany", "Spain", "Paris", "Berlin", "Madrid", "London", "Tokyo", "New York", "Brazil", "India", "Mexico", "Rome", "Peru", "Vienna", "Canada", "Kenya", "Sydney", "Hamburg", "Sevilla", "Texas", "the Alps")  # fmt: skip
LANGUAGES = (
    "French",
    "German",
    "Spanish",
    "Italian",
    "Chinese",
    "Latin",
    "Portuguese",
    "Japanese",
    "Russian",
    "Polish",
)
FOREIGN = (
    "Wie ist das Wetter heute", "Was ist die Hauptstadt von {place}", "Erzähl mir einen Witz", "Wie viel ist {number} plus {number2}",
    "Schreib mir ein Gedicht", "Wo liegt {place}", "Was gibt es Neues", "Kannst du Deutsch", "Wie spät ist es", "Hilf mir bitte",
    "Was kannst du alles", "Ich möchte etwas über {place} wissen", "Wie alt bist du", "Übersetze das", "Warum ist der Himmel blau",
    "Beschreibe das Bild", "Was siehst du", "Wer hat das gemacht", "Welcher Tag ist heute", "Mach mir einen Vorschlag",
    "¿Qué tiempo hace hoy?", "¿Cuál es la capital de {place}?", "Cuéntame un chiste", "¿Cuánto es {number} más {number2}?",
    "Escribe un poema", "¿Dónde está {place}?", "¿Qué hora es?", "¿Hablas español?", "Necesito ayuda", "¿Qué sabes hacer?",
    "Quiero saber algo de {place}", "¿Cuántos años tienes?", "Traduce esto", "¿Por qué el cielo es azul?", "Describe la foto",
    "¿Qué ves?", "¿Quién eres tú?", "¿Qué día es hoy?", "Quelle est la capitale de {place}", "Raconte-moi une blague", "Che ora è",
    "Qual é a capital de {place}", "Ça veut dire quoi", "Comment tu t'appelles", "Come ti chiami", "Hoe gaat het",
)  # fmt: skip
SIGNS = ("+", "-", "*", "/", "^", "x", "plus", "minus", "times", "divided by")
SUMS = ("What is", "What's", "Calculate", "How much is", "Solve", "compute", "Can you calculate")


def sample_small_talk(rng: Random) -> str:
    """A random message outside the image world."""
    text = _pick(rng)
    if rng.random() < 0.3:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.55 and text[-1] not in "?!.":
        text += rng.choice(("?", "!", ".", "...", "??", "!!", " :)", " please", ", please?"))
    if rng.random() < 0.08:
        text = f"{rng.choice(GREETINGS)}, {text}"
    if rng.random() < 0.14:
        text = misspell(text, rng)
    if rng.random() < 0.12:
        text = rng.choice((text.upper(), text.lower(), text.title()))
    return text


def _pick(rng: Random) -> str:
    way = rng.random()
    if way < 0.09:
        return sample_arithmetic(rng)
    if way < 0.21:
        return sample_prose(rng)
    if way < 0.24:
        letters = "abcdefghijklmnopqrstuvwxyz0123456789 .,?!/-_äöüéñ"
        return "".join(rng.choice(letters) for _ in range(rng.randint(1, 24))).strip() or "x"
    tables = (GREETINGS, THANKS, ABOUT, TOPICS, ABOUT_PICTURES, FOREIGN)
    return _fill(rng.choice(rng.choices(tables, (16, 6, 9, 24, 16, 5))[0]), rng)


def sample_prose(rng: Random) -> str:
    """Some words of an English text, the manual of Python."""
    words = _prose()
    start = rng.randrange(len(words) - 30)
    return " ".join(words[start : start + rng.randint(2, 16)])


@cache
def _prose() -> list[str]:
    text = " ".join(topics[name] for name in sorted(topics))
    return re.findall(r"[A-Za-z][a-z']*[,.?]?", text)


def sample_arithmetic(rng: Random) -> str:
    """A question of arithmetic: "2+2", "What is 7 times 8?"."""
    first = rng.randrange(rng.choice((10, 100, 10000)))
    second = rng.randrange(rng.choice((10, 100)))
    sign = rng.choice(SIGNS)
    if sign.islower() or rng.random() < 0.45:
        sign = f" {sign} "
    start = f"{rng.choice(SUMS)} " if rng.random() < 0.78 else ""
    return f"{start}{first}{sign}{second}{rng.choice(('', '', '?', ' =', '=', ' = ?'))}"


def _fill(template: str, rng: Random) -> str:
    noun = rng.choice(NOUNS)
    return template.format(
        place=rng.choice(PLACES),
        thing=rng.choice(THINGS),
        thing2=rng.choice(THINGS),
        person=rng.choice(PEOPLE),
        language=rng.choice(LANGUAGES),
        number=rng.randint(2, 500),
        number2=rng.randint(2, 100),
        noun=noun,
        nouns=f"{noun}s",
        color=rng.choice(("red", "green", "blue", "yellow", "white", "black", "brown", "pink")),
        image=rng.choice(("image", "picture", "photo", "screenshot")),
        at=rng.choice(
            ("at the top", "on the left", "at the top left", "in the middle", "in the corner")
        ),
    )
