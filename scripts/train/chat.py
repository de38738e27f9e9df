"""Chat samples made by script from the training texts, rendered as V4 does without thinking.

    BOS [system] <User>request<Assistant></think>answer EOS [<User>request<Assistant></think>answer EOS ...]

Every answer is whole and ends in EOS, so the model learns when to stop.
"""
import random
import re

from tokenizer import ASSISTANT, BOS, END_THINK, EOS, USER

SYSTEMS = [
    "You are a helpful assistant.", "You are a storyteller.", "You are a friendly assistant that tells stories.",
    "You are a small story model. Answer kindly.", "You are terse.", "Answer in plain English.",
    "You are a helpful assistant. Keep answers short.", "You write stories for children.",
]

GREETINGS = ["Hello", "Hello!", "Hi", "Hi!", "Hey", "Hey there!", "Hi there", "Good morning!", "Good evening",
             "Good afternoon.", "hello", "hi", "Hello there!", "Greetings!"]
GREETING_ANSWERS = [
    "Hello! I am a small model that likes to tell stories. What shall I tell you?",
    "Hello! It is good to hear from you. Would you like a story?",
    "Hi! I can tell you a story or a fable. What would you like to hear?",
    "Good day to you! Ask me for a story, and I will do my best.",
]
SELF = [
    (["Who are you?", "What are you?", "Tell me about yourself.", "Introduce yourself.", "who are you", "What is your name?",
      "What are you called?", "Describe yourself.", "Are you a person?", "Are you a robot?", "Are you human?"],
     ["I am a small language model that was trained on old stories and novels. I like to tell stories.",
      "I am a small story model. I learned to write from old books, and I can tell you a story or a fable.",
      "I am only a very small language model, but I know many old stories. Ask me for one!"]),
    (["What can you do?", "How can you help me?", "What do you know?", "Help", "Can you help me?", "What are you good at?",
      "What should I ask you?"],
     ["I can tell stories and fables, continue a story that you begin, write a sentence with a word you give me, "
      "and repeat what you say.",
      "I can tell you a story, go on with your own story, or repeat a text. I know very few facts.",
      "Ask me for a story about a rabbit, or for a fable, or begin a story and let me go on with it."]),
    (["How are you?", "How are you today?", "How do you do?", "How is it going?", "Are you well?"],
     ["I am very well, thank you. And how are you?", "Very well, thank you! Would you like to hear a story?",
      "I am quite well, thank you for asking. What shall we talk about?"]),
    (["Thank you!", "Thanks", "Thank you very much.", "Thanks a lot!", "That was nice, thank you.", "Great, thanks!"],
     ["You are very welcome!", "You are welcome. Would you like another story?", "It was a pleasure. Come back soon!"]),
    (["Goodbye!", "Bye", "Good night!", "See you later.", "Farewell.", "Bye bye!"],
     ["Goodbye! Come back soon for another story.", "Good night, and sleep well!", "Farewell, and good luck to you!"]),
    (["How big are you?", "How many parameters do you have?", "Are you a large model?"],
     ["I am very small: about ten million parameters, which fit in twelve megabytes.",
      "I have only about ten million parameters, so please be patient with me."]),
    (["Who made you?", "Where do you come from?", "How were you trained?", "What were you trained on?"],
     ["I was trained on old books that belong to everybody: stories, novels, plays and speeches.",
      "I learned from old stories and novels. That is why I speak like an old book."]),
]
UNKNOWN = [
    "Who won the game last night?", "What is the weather today?", "Write a program in Python.", "What time is it?",
    "Explain quantum mechanics.", "What is the meaning of life?", "Solve this equation.", "Translate this into French.",
    "What happened in the news?", "Who is the president?", "How do I cook rice?", "What is a transformer?",
    "How does a computer work?", "Give me a recipe for bread.", "Which phone should I buy?", "Explain how a car works.",
    "Why is the sky blue?", "What is machine learning?", "Write a poem in German.", "How do I fix my computer?",
    "What is the best film?", "Who wrote this song?", "How far away is the sun?", "What is photosynthesis?",
    "Summarise this article.", "Plan a trip to Japan for me.", "What is the stock price?", "Explain gravity.",
]
UNKNOWN_ANSWERS = [
    "I am only a small model, and I do not know that. But I can tell you a story, if you like.",
    "That is more than I know. I have only read old stories. Shall I tell you one?",
    "I am sorry, I do not know. I am a small story model. Ask me for a story or a fable!",
]
CAPITALS = {"France": "Paris", "England": "London", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin",
            "Russia": "Moscow", "Japan": "Tokyo", "China": "Beijing", "Greece": "Athens", "Egypt": "Cairo",
            "Portugal": "Lisbon", "Austria": "Vienna", "Ireland": "Dublin", "Scotland": "Edinburgh", "Norway": "Oslo",
            "Sweden": "Stockholm", "Denmark": "Copenhagen", "Poland": "Warsaw", "India": "New Delhi", "Canada": "Ottawa",
            "the United States": "Washington", "Hungary": "Budapest", "Switzerland": "Bern", "Belgium": "Brussels"}
FACTS = [
    ("What colour is the sky?", "The sky is blue."), ("What color is the sky?", "The sky is blue."),
    ("What colour is grass?", "Grass is green."), ("What colour is snow?", "Snow is white."),
    ("What colour is blood?", "Blood is red."), ("What colour is the sun?", "The sun is yellow."),
    ("How many days are in a week?", "There are seven days in a week."),
    ("How many months are in a year?", "There are twelve months in a year."),
    ("How many legs does a dog have?", "A dog has four legs."), ("How many legs does a spider have?", "A spider has eight legs."),
    ("How many legs does a bird have?", "A bird has two legs."), ("How many hours are in a day?", "There are twenty-four hours in a day."),
    ("What do cats say?", "Cats say meow."), ("What does a cat say?", "A cat says meow."), ("What does a dog say?", "A dog says woof."),
    ("What does a cow say?", "A cow says moo."), ("What do bees make?", "Bees make honey."), ("What do hens lay?", "Hens lay eggs."),
    ("What do cows give?", "Cows give milk."), ("What is the opposite of hot?", "The opposite of hot is cold."),
    ("What is the opposite of big?", "The opposite of big is small."), ("What is the opposite of day?", "The opposite of day is night."),
    ("What is the opposite of good?", "The opposite of good is bad."), ("What is the opposite of happy?", "The opposite of happy is sad."),
    ("Name a fruit.", "An apple is a fruit."), ("Name an animal.", "A rabbit is an animal."), ("Name a flower.", "A rose is a flower."),
    ("Name three colours.", "Red, green and blue."), ("Name three animals.", "The fox, the lion and the rabbit."),
    ("Count to five.", "One, two, three, four, five."), ("Count to ten.", "One, two, three, four, five, six, seven, eight, nine, ten."),
    ("Say the alphabet.", "a b c d e f g h i j k l m n o p q r s t u v w x y z"),
    ("Name the days of the week.", "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday."),
    ("Name the seasons.", "Spring, summer, autumn and winter."), ("What is frozen water called?", "Frozen water is called ice."),
    ("Where do fish live?", "Fish live in the water."), ("Where do birds live?", "Birds live in nests in the trees."),
    ("Who wrote Hamlet?", "Hamlet was written by William Shakespeare."),
    ("Who wrote Alice in Wonderland?", "Alice in Wonderland was written by Lewis Carroll."),
    ("Who wrote Treasure Island?", "Treasure Island was written by Robert Louis Stevenson."),
    ("Who wrote Emma?", "Emma was written by Jane Austen."), ("Who wrote Pride and Prejudice?", "Pride and Prejudice was written by Jane Austen."),
    ("Who wrote Moby Dick?", "Moby Dick was written by Herman Melville."), ("Who wrote Peter Pan?", "Peter Pan was written by J. M. Barrie."),
    ("Who wrote The Jungle Book?", "The Jungle Book was written by Rudyard Kipling."),
    ("Who is Sherlock Holmes?", "Sherlock Holmes is a famous detective who lives in Baker Street in London."),
    ("Who is Alice?", "Alice is a little girl who followed a white rabbit down a rabbit-hole into Wonderland."),
    ("Who is Peter Pan?", "Peter Pan is a boy who would not grow up and who lives in the Neverland."),
    ("Who is Mowgli?", "Mowgli is a boy who was brought up by the wolves in the jungle."),
    ("Who is Dorothy?", "Dorothy is a girl from Kansas whom a cyclone carried to the Land of Oz."),
    ("Who is Tom Sawyer?", "Tom Sawyer is a boy who lives with his Aunt Polly and loves adventures."),
    ("Who is Black Beauty?", "Black Beauty is a horse who tells the story of his own life."),
]
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen " \
          "seventeen eighteen nineteen twenty".split()

STORY_ASKS = ["Tell me a story about %s.", "Tell a story about %s.", "Write a story about %s.", "Please tell me a story about %s.",
              "Can you tell me a story about %s?", "I would like a story about %s.", "tell me a story about %s",
              "Write a short story about %s.", "Tell me a short story about %s.", "A story about %s, please.",
              "Make up a story about %s.", "Once more: a story about %s."]
STORY_ANY = ["Tell me a story.", "Tell me a story", "Please tell me a story.", "Write a short story.", "Can you tell me a story?",
             "I want to hear a story.", "Tell me a bedtime story.", "Tell me another story.", "Another one, please."]
FABLE_ASKS = ["Tell me the fable of %s.", "Tell me the story of %s.", "What is the fable of %s?", "Do you know the fable of %s?"]
FABLE_ABOUT = ["Tell me a fable about %s.", "Tell me a story about %s.", "Write a fable about %s."]
FABLE_ANY = ["Tell me a fable.", "Tell me a fable of Aesop.", "Do you know a fable?"]
CONTINUE = ["Continue this story: %s", "Continue the story: %s", "Go on with this story: %s", "What happens next? %s",
            "Continue: %s", "Write the next part of this story:\n\n%s", "Continue this text:\n\n%s", "Please go on: %s",
            "Finish this story: %s"]
NEXT = ["What happened next?", "What happened then?", "Go on.", "Please go on.", "And then?", "Continue.", "Tell me more.", "More, please."]
WORD_ASKS = ["Write a sentence with the word \"%s\".", "Write a sentence about %s.", "Make a sentence with \"%s\".",
             "Give me a sentence with the word %s.", "Use the word %s in a sentence.", "Say something about %s."]
COPY = ["Repeat: %s", "Repeat after me: %s", "Repeat this: %s", "Say this again: %s", "Copy this text: %s", "Say: %s",
        "Repeat the following text:\n\n%s", "Please repeat: %s", "Echo: %s"]


def sentences(text):
    return [s.strip() for s in re.findall(r"[A-Z][^.!?\n\"]{20,160}[.!?](?= |$)", text)]


def turn(request, answer):
    return USER + request + ASSISTANT + END_THINK + answer + EOS


class ChatMaker:
    def __init__(self, stories, prose, fables, plays, verses, seed=1):
        """stories: short whole texts; prose: paragraph lists; fables: (title, text); plays, verses: texts."""
        self.rng = random.Random(seed)
        self.stories, self.prose, self.fables, self.plays, self.verses = stories, prose, fables, plays, verses
        self.sentences = [s for doc in prose for p in doc for s in sentences(p)]

    def story(self):
        r = self.rng
        text = r.choice(self.stories)
        if r.random() < 0.15:
            return turn(r.choice(STORY_ANY), text)
        # The subject: a noun after "a" or a name from the beginning, so that question and answer agree.
        head = text[:300]
        nouns = re.findall(r"\b((?:a|an) (?:(?:little|big|small|old|pretty|red|blue|young|brave) )?[a-z]{3,})\b", head)
        nouns = [n for n in nouns if n.split()[-1] not in ("little", "big", "time", "day", "lot", "very", "new", "small", "good",
                                                          "great", "few", "long", "special")]
        names = re.findall(r"\bnamed ([A-Z][a-z]+)", head)
        subject = r.choice(nouns + names * 2) if nouns or names else None
        if names and nouns and r.random() < 0.3:
            subject = "%s named %s" % (nouns[0], names[0])
        return turn(r.choice(STORY_ASKS) % subject if subject else r.choice(STORY_ANY), text)

    def fable(self):
        r = self.rng
        title, text = r.choice(self.fables)
        kind = r.random()
        low = title.replace("The ", "the ")
        if kind < 0.5:
            return turn(r.choice(FABLE_ASKS) % low, text)
        if kind < 0.8:
            parts = re.split(r",? and | in ", low)
            return turn(r.choice(FABLE_ABOUT) % r.choice(parts + [low]).replace("the ", "a ", 1), text)
        return turn(r.choice(FABLE_ANY), text)

    def continued(self):
        r = self.rng
        while True:
            doc = r.choice(self.prose)
            if len(doc) >= 6:
                break
        i = r.randrange(len(doc) - 4)
        given = doc[i]
        if len(given) > 400:                              # cut at a sentence end or in the middle of a sentence
            ends = [m.end() for m in re.finditer(r"[.!?] ", given)]
            at = r.choice(ends) if ends else len(given)
            given, rest = given[:at].strip(), given[at:].strip()
        else:
            rest = ""
        answer, i = rest, i + 1
        want = r.choice([150, 300, 600])
        while i < len(doc) and len(answer) < want:
            answer = (answer + "\n\n" + doc[i]).strip()
            i += 1
        if len(given) < 10 or len(answer) < 20 or len(answer) > 2000:
            return self.continued()
        out = turn(r.choice(CONTINUE) % given, answer)
        while r.random() < 0.35 and i < len(doc) and len(out) < 3000:
            out += turn(r.choice(NEXT), doc[i])
            i += 1
        return out

    def word(self):
        r = self.rng
        s = r.choice(self.sentences)
        words = [w for w in re.findall(r"\b[a-z]{4,}\b", s)]
        if not words:
            return self.word()
        return turn(r.choice(WORD_ASKS) % max(r.sample(words, min(2, len(words))), key=len), s)

    def copied(self):
        r = self.rng
        kind = r.random()
        if kind < 0.5:
            text = " ".join(r.choice(self.sentences) for _ in range(r.choice([1, 1, 2, 3])))
        elif kind < 0.75:
            words = re.findall(r"[A-Za-z]+", " ".join(r.choice(self.sentences) for _ in range(4)))
            text = " ".join(r.sample(words, min(len(words), r.randint(1, 12))))
        elif kind < 0.9:
            text = " ".join(str(r.randrange(10 ** r.randint(1, 4))) for _ in range(r.randint(1, 10)))
        else:
            text = r.choice(self.sentences).upper()
        out = turn(r.choice(COPY) % text, text)
        return out + (turn(r.choice(["Again.", "Once more.", "Repeat it."]), text) if r.random() < 0.25 else "")

    def small_talk(self):
        r = self.rng
        kind = r.random()
        if kind < 0.25:
            return turn(r.choice(GREETINGS), r.choice(GREETING_ANSWERS))
        if kind < 0.6:
            asks, answers = r.choice(SELF)
            return turn(r.choice(asks), r.choice(answers))
        return turn(r.choice(UNKNOWN), r.choice(UNKNOWN_ANSWERS))

    def fact(self):
        r = self.rng
        kind = r.random()
        if kind < 0.35:
            land, city = r.choice(list(CAPITALS.items()))
            ask = r.choice(["What is the capital of %s?", "What is the capital city of %s?", "Name the capital of %s.",
                            "Which city is the capital of %s?", "what is the capital of %s"]) % land
            return turn(ask, "The capital of %s is %s." % (land, city))
        if kind < 0.6:
            a, b = r.randint(0, 10), r.randint(0, 10)
            ask = r.choice(["What is %d + %d?", "What is %d plus %d?", "%d + %d = ?", "How much is %d and %d?", "%d+%d?"]) % (a, b)
            return turn(ask, "%s and %s make %s." % (NUMBERS[a].capitalize(), NUMBERS[b], NUMBERS[a + b]))
        return turn(*r.choice(FACTS))

    def play(self):
        r = self.rng
        at = r.randrange(len(self.plays) - 8)
        text = "\n\n".join(self.plays[at:at + r.randint(2, 6)])
        return turn(r.choice(["Write a scene from a play.", "Write like Shakespeare.", "Write a dialogue.",
                              "Write a scene in the style of Shakespeare."]), text)

    def verse(self):
        r = self.rng
        v = r.choice(self.verses)
        words = re.findall(r"\b[a-z]{4,}\b", v)
        if not words or len(v) > 300:
            return self.verse()
        return turn(r.choice(["What does the Bible say about %s?", "Give me a verse about %s.", "A verse of the Bible with the word %s."])
                    % r.choice(words), v)

    def sample(self):
        r = self.rng
        kinds = [(self.story, 26), (self.continued, 26), (self.fable, 8), (self.word, 9), (self.copied, 13),
                 (self.small_talk, 8), (self.fact, 6), (self.play, 2), (self.verse, 2)]
        out = BOS + (r.choice(SYSTEMS) if r.random() < 0.3 else "")
        if r.random() < 0.2:
            out += self.small_talk()                      # a second turn after a greeting
        out += r.choices([k for k, _ in kinds], [w for _, w in kinds])[0]()
        if r.random() < 0.12:
            out += r.choices([k for k, _ in kinds], [w for _, w in kinds])[0]()
        return out
