"""Words and templates that prompts are made of. Written for this project; see prompts.py."""

from __future__ import annotations

from typing import Final

Words = tuple[str, ...]

NAMES: Final[Words] = (
    "Amara", "Bruno", "Chiara", "Dmitri", "Elif", "Farid", "Greta", "Hiro", "Ines", "Jonas",
    "Katarina", "Leila", "Mateo", "Nadia", "Oskar", "Priya", "Quentin", "Rosa", "Samir", "Tove",
    "Uma", "Viktor", "Wanda", "Xavier", "Yara", "Zoltan", "Abena", "Callum", "Dalia", "Emeka",
)  # fmt: skip
PLACES: Final[Words] = (
    "Lisbon", "Nairobi", "Osaka", "Tromsø", "Valparaíso", "Ghent", "Hanoi", "Winnipeg", "Tbilisi",
    "Marrakesh", "Galway", "Adelaide", "Kraków", "Quito", "Bergen", "Jaipur", "Dakar", "Ljubljana",
    "a small mountain village", "a harbour town", "the old quarter", "an island in the north",
    "a suburb of Leeds", "the valley", "the university", "a border town",
)  # fmt: skip
TOPICS: Final[Words] = (
    "volcanoes", "bread baking", "electric cars", "sleep", "the immune system", "chess", "bees",
    "inflation", "tides", "black holes", "public libraries", "the Roman army", "photosynthesis",
    "jazz", "football tactics", "gardening on a balcony", "learning a language", "solar panels",
    "vaccines", "probability", "coffee", "earthquakes", "the stock market", "recycling", "whales",
    "printing with movable type", "remote work", "meditation", "bridges", "dinosaurs",
    "antibiotics",
    "climate and weather", "machine learning", "encryption", "the human heart", "cheese making",
    "city planning", "mountain climbing", "the French Revolution", "renting a flat",
    "job interviews",
    "childhood friendships", "running a marathon", "databases", "the water cycle", "glaciers",
    "email etiquette", "public speaking", "saving money", "migration of birds", "nuclear power",
    "stage fright", "pottery", "the solar system", "compilers", "democracy", "railways", "magnets",
    "the history of writing", "tea", "insulation of old houses", "wolves", "time zones",
    "rice farming",
    "photography at night", "online privacy", "allergies", "sailing", "the periodic table",
    "mushrooms",
    "podcasts", "supply chains", "the Silk Road", "knitting", "rainforests", "hashing", "bicycles",
    "school uniforms", "artificial reefs", "open-source software", "noise in cities", "lighthouses",
)  # fmt: skip
THINGS: Final[Words] = (
    "a wooden boat", "the community garden", "an old piano", "the new tram line", "a lost suitcase",
    "the town archive", "a weather station", "the swimming pool", "a food market",
    "the north bridge",
    "a second-hand bookshop", "the repair café", "a telescope", "the night bus", "a stray dog",
    "the school orchestra", "an underground river", "the solar roof", "a recipe book",
    "the clock tower",
)  # fmt: skip
GROUPS: Final[Words] = (
    "the city council", "a group of students", "the fire brigade", "a local newspaper",
    "the engineers", "the residents", "a charity", "the museum", "a research team", "the choir",
    "three neighbours", "the transport company", "the harbour office", "a cooperative",
)  # fmt: skip
DAYS: Final[Words] = (
    "Monday", "Tuesday morning", "the 3rd of March", "last Thursday", "a foggy Friday",
    "Saturday evening", "the 21st of June", "the first Sunday of the month", "12 October",
)  # fmt: skip
AUDIENCES: Final[Words] = (
    "a child of eight", "a beginner", "a tired colleague", "my grandmother", "a group of teenagers",
    "an engineer from another field", "a new employee", "someone who has never heard of it",
    "a politician", "a sceptical friend", "a high-school class", "a tourist",
)  # fmt: skip
TONGUES: Final[Words] = ("French", "German", "Spanish", "Italian", "Portuguese", "Dutch", "English")
COUNTS: Final[Words] = ("three", "four", "five", "six", "seven", "ten")
COUNTABLES: Final[Words] = (
    "apples", "pencils", "tickets", "marbles", "bottles", "stamps", "chairs", "eggs", "bricks",
    "postcards", "seedlings", "coins", "batteries", "pages", "kilometres", "cups of flour",
)  # fmt: skip
MANNERS: Final[Words] = (
    "Keep it short.", "Answer in two paragraphs.", "Use bullet points.", "Give an example.",
    "Be precise.", "Use simple words.", "Explain your reasoning.", "Answer in a friendly tone.",
    "Use numbered steps.", "One paragraph is enough.", "Mention at least one drawback.",
    "Do not use technical terms.", "Finish with a short summary.", "Write about 150 words.",
)  # fmt: skip

SITUATIONS: Final[Words] = (
    "I moved to a new city and know nobody", "my landlord does not answer my letters",
    "I have to give a talk next week", "my laptop has become very slow", "I cannot fall asleep",
    "my friend forgot my birthday", "I want to change careers at forty", "I have twenty euros left",
    "my plants keep dying", "my boss praises work that I did under another's name",
    "I have an exam in three days", "my neighbours are loud at night", "I want to start running",
    "my child does not want to read", "I missed my flight", "I was offered two jobs",
    "my team never finishes on time", "I want to eat less sugar", "I am planning a small wedding",
    "I broke a vase that was not mine", "I have to write a letter of complaint", "I feel homesick",
    "my bicycle was stolen", "I want to learn to draw", "my phone fell into water",
    "I will host six guests tonight", "I forgot a colleague's name", "my cat hides all day",
)  # fmt: skip
CHAT: Final[Words] = (
    "Hi! {situation}. What should I do?",
    "{situation}. Can you help me to make a plan?",
    "{situation}. What would you say to me?",
    "Hello, I am interested in {topic}. Where do I start?",
    "What do you think about {topic}?",
    "Tell me something surprising about {topic}.",
    "{situation}, and I am a little worried. Any advice?",
    "I have an hour to learn about {topic}. How do I use it best?",
    "Let us talk about {topic}. Begin with a question to me.",
    "What are common mistakes when dealing with {topic}?",
    "Is it true that most people misunderstand {topic}? Why?",
    "{situation}. Give me three options and recommend one.",
)
EXPLAIN: Final[Words] = (
    "Explain {topic} to {who}.",
    "How does {topic} work?",
    "What is the connection between {topic} and {other}?",
    "Compare {topic} and {other}.",
    "Why does {topic} matter today?",
    "Describe the history of {topic}.",
    "What are the advantages and disadvantages of {topic}?",
    "Give {who} a short introduction to {topic}.",
    "Which three facts about {topic} should everybody know?",
    "What would change in the world without {topic}?",
    "Describe step by step what happens in the case of {topic}.",
    "Correct this claim if it is wrong: there is nothing new to learn about {topic}.",
)
LISTS: Final[Words] = (
    "List {count} ideas for a school project about {topic}.",
    "Give me {count} questions that {who} could ask about {topic}.",
    "Name {count} things to see in {place}, with one sentence on each.",
    "Write {count} short tips for people who care about {topic}.",
    "Make a table of {count} terms from {topic} and what they mean.",
    "Suggest {count} titles for an article about {topic}.",
    "Give {count} reasons for and {count} against more spending on {topic}.",
    "Plan {count} days in {place} for {who}.",
    "Write a quiz of {count} questions with answers about {topic}.",
)
WRITE: Final[Words] = (
    "Write a short story about {person}, who finds {thing} in {place}.",
    "Write a poem about {topic}.",
    "Write an email from {person} to a colleague: {situation}.",
    "Write a diary entry of a person who says: {situation}.",
    "Write the opening paragraph of a novel that begins with {thing}.",
    "Write a speech for the opening of {thing} in {place}.",
    "Write a dialogue between {person} and a stranger about {topic}.",
    "Write a product description for a course on {topic}.",
    "Write a review of a documentary about {topic}.",
    "Write a blog post that makes {topic} interesting for beginners.",
    "Write a polite letter to the mayor of {place} about {thing}.",
    "Write an essay of five paragraphs on {topic}.",
    "Continue this story: {person} opened the door, and there stood {thing}.",
    "Write a news report: {person} has saved {thing} in {place}.",
)

LANGUAGES: Final[Words] = (
    "Python", "Python", "Python", "JavaScript", "Java", "C", "C++", "Rust", "Go", "SQL", "Bash",
    "TypeScript",
)  # fmt: skip
DATA_KINDS: Final[Words] = (
    "a list of integers", "a string", "a dictionary of names and ages", "a binary tree",
    "a matrix of numbers", "a CSV file", "a list of words", "a linked list", "a JSON document",
    "a log file", "a list of dates", "two sorted lists", "a graph as adjacency lists",
)  # fmt: skip
CODE_TASKS: Final[Words] = (
    "reverses it", "counts how often each element occurs", "removes duplicates and keeps the order",
    "finds the largest element", "checks whether it is sorted", "splits it into chunks of n",
    "finds the longest run of equal elements", "returns the second smallest element",
    "groups its elements by their first character", "computes a moving average",
    "validates it and raises an error that says what is wrong", "merges it with another one",
    "prints it as a table", "searches it for a given value", "rotates it by k places",
    "converts it to another format", "returns the median", "finds all pairs that sum to a target",
)  # fmt: skip
CODE: Final[Words] = (
    "Write a function in {language} that takes {data} and {task}.",
    "Write a {language} program that reads {data} and {task}.",
    "Write a {language} function that takes {data} and {task}. Add a comment to each line.",
    "Write a class in {language} that wraps {data} and has a method that {task}.",
    "Write unit tests in {language} for a function that takes {data} and {task}.",
    "Explain with code in {language} how to write a function that takes {data} and {task}.",
    "A function in {language} takes {data} and {task}. What edge cases must it handle? Show code.",
    "Give two versions in {language} of a function that takes {data} and {task}: a simple one and "
    "a fast one.",
)

MATHS: Final[Words] = (
    "{person} has {a} {thing} and buys {b} more, then gives {c} away.",
    "A box holds {a} {thing}. {person} fills {b} boxes and has {c} {thing} left over.",
    "{person} sells {a} {thing} at {b} cents each and spends {c} cents on packing each of them.",
    "{person} needs {a} minutes for {b} {thing} and works for {c} hours.",
    "There are {a} rows with {b} {thing} each. {person} removes {c} from every second row.",
    "{person} shares {a} {thing} among {b} friends as evenly as possible.",
    "A price of {a} euros rises by {b} percent and then falls by {c} percent.",
    "{person} walks {a} km at {b} km per hour and rests for {c} minutes on the way.",
    "Twice a number plus {a} equals {b} times {c}.",
    "{person} collected {a} {thing} in the first week and {b} more in each week after it, for {c} "
    "weeks in all.",
    "A tank holds {a} litres, {b} litres flow in and {c} litres flow out every minute.",
    "{person} and a friend have {a} {thing} together; the friend has {b} more.",
)
MATHS_ENDINGS: Final[Words] = (
    "How many are there in the end?", "What is the result? Think step by step.",
    "Solve it and show every step.", "What is the answer? Explain how you found it.",
    "Set up an equation and solve it.", "Give the result and check it.",
)  # fmt: skip

SENTENCES: Final[Words] = (
    "On {day}, {person} visited {thing} in {place} for the first time.",
    "{group} had planned the work for {large} days and finished it in {small} months.",
    "According to {other}, more than {large} people came to see it.",
    "The costs of {large} thousand euros were paid by {group}.",
    "Nobody had expected that {topic} would play a role at all.",
    "{other} said that it was the best decision in {small} years.",
    "At first {group} was against it, because {thing} was thought to be too expensive.",
    "Since then {person} has written {small} articles about {topic}.",
    "In the afternoon it began to rain, and only {small} of {large} visitors stayed.",
    "A new rule says that {thing} must be checked every {small} months.",
    "{person} and {other} disagree about what should happen next.",
    "The plan is to open {thing} again on {day}, with room for {large} guests.",
    "Experts on {topic} warn that the problem may return within {small} years.",
    "{person}, who grew up in {place}, works {small} hours a week for {group}.",
    "A survey among {large} people showed that {small} percent had never heard of {topic}.",
    "The oldest part of {thing} was built {large} years ago.",
    "After the meeting {other} sent a letter to {group} and asked for {small} changes.",
    "Tickets cost {small} euros, and children under {small} pay nothing.",
    "Most of the money came from a sale of books about {topic}.",
    "{group} will decide on {day} whether {person} may go on.",
)
SUMMARISE: Final[Words] = (
    "Summarise the following text in one sentence.",
    "Summarise the text below in two sentences.",
    "Write a headline and a short summary for this text:",
    "What are the main points of this text? Answer as a list.",
    "Shorten the following text to half its length.",
    "Explain in your own words what this text says.",
)
EXTRACT: Final[Words] = (
    "List all names and places in the following text.",
    "Extract every number in this text and say what it stands for.",
    "Return the persons, places and dates of this text as JSON.",
    "Make a table of who did what in this text.",
    "Which facts in this text could be checked? Quote them word for word.",
    "Copy the sentences of this text that contain a number.",
)
EDIT: Final[Words] = (
    "Rewrite the following text in a formal style.",
    "Correct all mistakes in this text and return the whole text.",
    "Rewrite this text in the present tense.",
    "Repeat the text below, but put each sentence on a line of its own.",
    "Rewrite this text so that a child understands it.",
    "Improve the following text and keep its meaning.",
    "Replace every name in this text by another one and return the whole text.",
    "Translate the following text into {language}.",
)
ANSWER: Final[Words] = (
    "Read the text and answer: who is involved, and what happened?",
    "Read the text. What is likely to happen next, and why?",
    "Using only the text below, write three questions with their answers.",
    "What is not said in this text that a reader would want to know?",
    "Is the tone of this text positive or negative? Give evidence from the text.",
    "Read the text and answer: which numbers are named, and which is the largest?",
)
TRANSLATE: Final[Words] = (
    "Translate into {tongue}:",
    "How do you say this in {tongue}?",
    "Give a translation into {tongue} and explain difficult words:",
    "Translate the next sentence to {tongue} and nothing else.",
)
FOREIGN: Final[Words] = (
    "Der Zug nach Norden fährt heute zwanzig Minuten später ab.",
    "Können Sie mir sagen, wo die nächste Apotheke ist?",
    "Wir haben gestern lange über den Garten gesprochen.",
    "Meine Schwester arbeitet seit drei Jahren in einer Bibliothek.",
    "Je voudrais réserver une table pour quatre personnes.",
    "Le marché du dimanche ferme à midi, même en été.",
    "Mon voisin répare des vélos dans sa cour.",
    "Elle a perdu ses clés en descendant du bus.",
    "La biblioteca abre a las nueve y cierra a las ocho.",
    "Mi abuela siempre cuenta la misma historia.",
    "Mañana vamos a plantar tomates en el balcón.",
    "El tren llegó tarde porque había nieve en las vías.",
    "Domani comincia il corso di ceramica.",
    "Il ponte vecchio è chiuso fino a settembre.",
    "A chuva parou e as crianças voltaram a brincar.",
    "De fiets staat al een week voor het station.",
)
