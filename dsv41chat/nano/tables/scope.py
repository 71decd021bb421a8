"""Questions the model cannot answer, by topic: wordings in bracket grammar, then `=>` and the one reply of the topic.

Slots: {word} any word, {name} an invented person, {place} a country or city, {year} a year, {number} a number, {verb} a plain verb.
"""
from __future__ import annotations

_TEXT = """
[what is|what's|how is|how's|tell me] the weather [|today|tomorrow|like|in {place}|like in {place}|right now|this week]
[will|does|is] it [rain|raining|snow|snowing|going to rain] [|today|tomorrow|in {place}|this weekend]
[is it|will it be] [cold|warm|hot|sunny|windy|cloudy] [|today|outside|in {place}|tomorrow]
[what is|how high is|what's] the temperature [|outside|in {place}|today]
[weather|forecast] [|today|{place}|for {place}|for tomorrow]
do i need [an umbrella|a coat|a jacket] [|today|tomorrow|in {place}]
=> I don't know the weather, I have no connection to the outside.
[what time is it|what's the time|do you know the time|current time|how late is it|tell me the time|what is the time] [|now|in {place}|please]
[what day is it|what's the date|what is the date|which day is it|what year is it|what month is it|which year do we have] [|today|now]
[is today|is it] [monday|friday|sunday|a holiday|the weekend]
how many days [until|till|are left until] [christmas|easter|summer|my birthday|the holidays]
=> I don't know the time or the date, I have no clock.
[who is|who was|who's|do you know|tell me about|what do you know about|what did] {name} [|do]
[who is|who's|who was] the [president|king|queen|prime minister|leader|mayor|chancellor|ruler|ambassador] of {place}
[who is|who was] the [first|last|richest|oldest|tallest|most famous|best] [person|man|woman|singer|actor|writer|scientist|painter|player] [|in the world|of {place}|ever]
[who invented|who discovered|who wrote|who painted|who built|who founded|who composed|who created] the {word}
[when was|when did|where was|where did|how old is|how old was] {name} [born|die|live|grow up]
[is|was] {name} [famous|rich|alive|married|a {word}]
[name|give me|list] [a famous|some famous|three|five] [singer|singers|actors|writers|scientists|painters|players]
=> I don't know people, I only know a few kinds of facts.
[who won|who will win|who lost|who plays in] the [game|match|cup|election|race|war|final|championship|{word} cup] [|yesterday|in {year}|last year|tonight]
[what is|what's|tell me|any|give me] the [news|latest news|headlines] [|today|from {place}|about {name}]
[what happened|what is happening|what's going on] [in {place}|today|yesterday|in {year}|in the world|last night]
[did|has] {name} [win|lose|resign|say something|call]
what is the score
=> I don't know the news, I have no connection to the outside.
[when did|when was|in which year did|in what year was|when will] the [war|battle|revolution|{word} war|{word}] [begin|end|start|happen|built|invented|over|signed]
[what happened|who ruled|how was life] in {year}
[why did|how did] the [war|empire|revolution|{word} empire|kingdom of {place}] [begin|end|fall|start]
[tell me about|what do you know about|explain] the history of [{place}|the {word}|the world]
which year was the {word} [invented|discovered|founded]
=> I don't know history and dates, I only know a few kinds of facts.
[what will happen|what happens] [tomorrow|next year|in the future|in {year}]
[will|can|is] [i|we|my {word}] [be rich|win|pass the exam|survive|find a {word}|get the job|going to win]
[predict|tell me|what is] [the future|my future|my horoscope|the lottery numbers|next week]
[should i|shall i|do you think i should|is it good to] [{verb}|buy a {word}|sell my {word}|marry {name}|move to {place}|take the job|quit my job|learn {word}]
[is|are] [{word}|{name}|{place}|cats|dogs] [better|worse|nicer] than [{word}|{name}|{place}|cats|dogs]
[what do you think about|what is your opinion on|do you like|your opinion about] [{word}|{name}|{place}|the {word}]
[what is|which is|what's] the [best|worst|nicest|cheapest|most beautiful] {word} [|in {place}|in the world|for me|to buy]
=> I don't know, I cannot judge or foresee such things.
[write|compose|make|create|draft|can you write|please write|i need] [me |][an essay|a poem|a story|a song|a letter|an email|a speech|a report|a summary|a novel|a review|an article] [|about {word}|about the {word}|on {word}|for {name}|for my {word}]
[sing|rap|recite] [me |][a song|a poem|something] [|about {word}]
[summarise|summarize|proofread|rewrite|improve|correct|shorten] [this text|my essay|my letter|the book {word}|this article|the following]
[continue|finish|complete] [this story|the poem|my text|the sentence]
=> I don't know how to write longer texts, I am too small for that.
[write|make|create|can you write|please write|i need|give me] [me |][a program|code|a script|a function|a python script|some code|a game|a website|an app|a class|sql] [|that sorts a list|for {word}|to {verb} a {word}|that prints {word}|which counts {word}]
[fix|debug|review|refactor|why does] my [code|program|script|website|function] [|fail|crash|not work]
[how do i|how can i] [program|code|implement|build] [a {word}|an app|a game|a website|a compiler|a parser]
=> I don't know how to write programs, I only say what a command or a Python name does.
[how do i|how can i|how do you|how does one|how to|what is the best way to|teach me to|show me how to] [cook|bake|fix|repair|build|clean|grow|make|sell|paint|catch|open|draw|play] [a|my|the] {word}
[how do i|how can i|how to] [lose weight|get rich|make money|find a job|fall asleep|learn {word}|get to {place}|make friends|{verb} better|stop smoking|become a {word}]
[give me|what is|i need|do you have] [a recipe|the recipe|instructions|a plan|tips|advice] [for|on] [{word}|a {word}|my {word}]
[my|the] [car|phone|printer|{word}|washing machine|computer] [is broken|does not work|makes a strange noise|won't start]
=> I don't know how to do that, I only know a few kinds of facts.
[what is|what's|how much is|tell me] the price of [{word}|a {word}|gold|a house in {place}|oil|a flight to {place}]
[how much|what] does [a {word}|it|a house in {place}|a ticket to {place}] cost
[where can i|where do i|can i] [buy|find|get|order|rent] [a {word}|{word}|cheap {word}|a {word} in {place}]
[book|reserve|order|buy] [me |][a flight|a hotel|a table|a taxi|a pizza|a ticket|a {word}] [|to {place}|in {place}|for two|for tomorrow]
[when does|when will|where is] the [next |][train|bus|shop|museum|ferry|plane] [leave|open|arrive|close|stop]
=> I don't know prices, shops or timetables, I have no connection to the outside.
[translate|say|how do you say|what is|how do i say] [{word}|the {word}|hello|thank you|good morning] [in|into|to] [french|german|spanish|italian|latin|chinese|japanese|russian|greek|arabic]
[what is|what's] the [french|german|spanish|italian|latin|chinese] [word|term] for [{word}|the {word}]
=> I don't know other languages, I only understand English.
[i have|my {word} has|my child has|she has|he has] [a headache|fever|a cold|pain|a rash|a cough|back pain|a broken {word}] [|what should i do|what can i do|is that bad]
[is it|is that] [legal|illegal|allowed|healthy|dangerous|safe|poisonous] to [{verb}|eat {word}|drive without a {word}|keep a {word}|{verb} a {word}]
[what medicine|which pill|which doctor] [helps against|is good for|should i take for] [a headache|fever|{word}|pain]
[can i sue|do i have to pay|what are my rights against] [my landlord|my boss|{name}|the {word}]
=> I don't know about health or law. Please ask an expert.
[open|start|run|delete|close|read|send|play|download|install|show me] [my |the ][file|files|email|music|browser|calendar|video|photo|photos|mail|message|camera] [|now|please|to {name}]
[call|text|email|remind|wake] [{name}|me|my {word}] [|now|tomorrow|at {number}|in an hour]
[turn|switch] [on|off] the [light|lights|radio|heating|tv|{word}]
[set|start] [an alarm|a timer|a reminder] [|for {number} minutes|for tomorrow]
=> I don't know how to act on your machine, I can only answer in text.
[how many|how much] [{word}|people|stars|trees|fish|cars|books] [are there|exist|live] [|in {place}|in the world|in the sky|on earth]
[how far|how long|how high|how deep|how fast|how heavy|how old] is [the {word}|a {word}|the moon|the sun|{place}|the sea]
[why is|why are|why do|why does] [the {word}|{word}|the sky|the sea|grass] [blue|green|round|so {word}|exist|{verb}|important|red]
[is there|are there] [life on mars|a god|ghosts|aliens|a {word} in {place}]
[what is|what's] the meaning of life
[what is|what's] [the largest|the smallest|the longest|the highest|the fastest] [{word}|animal|river|mountain|building|lake] [|in {place}|in the world|on earth]
[which|what] [{word}|animal|plant|book|film|colour] [is|has|was] [the biggest|the most {word}|the best|the oldest]
=> I don't know that, it is outside my few topics.
"""


def _parse() -> tuple[tuple[tuple[str, ...], str], ...]:
    groups, lines = [], []
    for line in _TEXT.strip().splitlines():
        if line.startswith("=> "):
            groups.append((tuple(lines), line[3:]))
            lines = []
        else:
            lines.append(line)
    return tuple(groups)


SCOPE = _parse()
VERBS = """
run swim walk sleep cook read write drive dance sing learn work wait eat drink travel speak build paint teach climb jump fight win help move play
study talk
""".split()
