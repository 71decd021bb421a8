"""Wordings that no generator uses: a harder test of finding the key than the held-out part of the grammar. Written by hand, never trained on."""
from __future__ import annotations

DEFINE: tuple[str, ...] = (
    "yo whats {} supposed to be", "my kid keeps saying {} and i have zero clue", "Never in my life did I come across {}. Enlighten me!", "{}??? come on, spill it", "Give it to me straight: {}",
    "is {} some kind of animal or what", "ELI5 {}", "not gonna lie, {} puzzles me", "Could anybody here shed light on {}?", "In layman's terms, {}", "quick refresher on {} pls",
    "how'd you sum up {}", "i stumbled upon {} whilst reading, thoughts?", "Crossword clue: {}. Any hints?", "whenever folks bring up {} i nod along but honestly no idea",
    "So like, {}, that's a thing?", "I'd appreciate a brief account of {}.", "pretend I'm five and tell me what {} means", "the article kept going on about {}, please elucidate",
    "Wikipedia was down so I'm asking you: {}", "gimme the lowdown on {}", "{} = ?", "My grandma used {} in her letter. Meaning?", "does {} ring a bell",
    "I keep seeing {} everywhere", "would love a hand figuring out {}", "hit me with the definition of {}", "sum it up for me: {}", "care to explain {}", "whats {} in simple english",
    "got stuck on {} in my homework, help", "any chance you know {}", "explain like i am an alien: {}", "what's the deal with {}", "I was told to research {}. Where do I start?",
    "uhh so {}... what", "teach me {}",
)
COMMAND: tuple[str, ...] = ("whats the point of the {} command", "remind me, {} in a shell script does what", "I ran the {} command by accident, what did I just do", "linux noob here: {} command?",
                            "the tutorial uses the {} command without saying why", "can someone describe the unix utility {}", "{} cmd linux", "man page summary for the {} command", "ELI5 the {} command")
PYTHON: tuple[str, ...] = ("python newbie, whats {}", "my code calls {}, python 3. what happens there", "python's {} in a nutshell", "remind me what {} does in python", "ELI5 {} in python", "quick one on python {}")
CAPITAL: tuple[str, ...] = ("whats {}s capital", "yo capital city of {}?", "quiz night! {} - capital?", "if i fly to the capital of {}, which city do i land in", "the seat of the government of {}?",
                            "my son must learn the capital of {}", "{}: whats the capital there", "I always mix up the capital of {}")
SUM: tuple[str, ...] = ("{} equals?", "yo {}", "my homework says {}", "{}... i am bad at maths", "quick maths: {}", "hey whats {} again", "pls crunch {}", "{} makes how much")
ASK: tuple[str, ...] = ("so whats my {} again", "bet you forgot my {}", "hey, my {}?", "you still got my {} in mind right", "quiz: my {}", "earlier i mentioned my {}, what was it")
