"""How people ask: bracket grammar per intent ({} is the key), openings, endings and the plain words of which word soups are made.

`[a|b|]` picks one alternative (possibly nothing); brackets nest. Each line is one rule; the cores of an intent are all expansions of its rules.
"""
from __future__ import annotations

OPENINGS = """
[hi|hello|hey|good morning|good evening|dear nano|hi there|hello there|hey there|hey nano][,|!|.|] [|how are you?|nice to see you.|it's me again.|me again.|I'm back.|long day today.|hope you are well.|]
[please|pls|plz|kindly|be so kind,|if you please,|would you kindly]
[can|could|would|will] you [please|quickly|kindly|maybe|perhaps|possibly|briefly|just|]
[can|could|would] you [please|] [tell|teach|show|inform|explain to|remind] me[,| please:| in short:|:|]
[I wonder|I was wondering|I ask myself|I keep asking myself|I would like to know|I'd like to know|I want to know|I need to know|I'm curious|I am curious|I would love to know][,|:|]
[do|would|might] you [know|happen to know|remember|still know|perhaps know|by chance know][,|:|]
[quick|short|small|simple|silly|stupid|one more|another|next|last|final|first|second|new|different] [question|one|request|thing|task][:|,|.| -]
[sorry|excuse me|pardon|apologies][,| but| for asking,| for the silly question,| to bother you again,|]
[ok|okay|right|alright|fine|good|great|well|so|now|then|and|also|next|thanks|thank you|cool|perfect|nice|wow|hmm|um|uh|ah|oh|yes|no][,|.|!|...|] [next|now|then|and|so|also|another one|one more|]
[for|in] my [homework|notes|school work|book|class|crossword|puzzle|essay|exam|test|job|quiz|blog|course|article|letter|lesson|talk|game|report|thesis][,|:| I need this:|]
[my|a|the] [teacher|friend|boss|son|daughter|mother|father|brother|sister|neighbour|colleague|professor|child|wife|husband|uncle|aunt|cousin|student|doctor] [asked me|wants to know|asks|said it|used it today|is asking|does not know,|told me to ask][:|,|.|]
[I read it|I saw it|I heard it|I found it|I came across this|it was] [in a book|in the paper|on the radio|on tv|at work|at school|yesterday|last week|on a sign|in a film|online|in a letter|this morning|in an article|somewhere][.|:|,| and]
[I have|I've got|there is|here is|here comes|let me ask you] [a question|one question|something|a small one|another one|one more thing|an easy one|a hard one][:|.|,| for you:]
[I don't know|I do not know|no idea|I forgot|I can't remember|I never learned|I am not sure|not sure|I always mix it up|I should know this][,|:|.| but| so|]
[help me|help|help me out|help me with this|I need help|need help|a little help][:|,|.| please:|]
[let's|let us] [see|try|start|continue|go on|move on|play|practise|practice][:|,|.]
[just|simply|only|really|honestly|seriously|actually|basically][,|]
[before I forget|while we are at it|by the way|btw|fyi|for the record|between us|out of interest|out of curiosity|just curious|just checking|in general|in other words|to be clear][,|:]
[we|they|people|my friends|my kids|the others] [talk about this|were talking|had a debate|could not agree|were wondering|asked around][.|:|,| and|]
[test|testing|example|exercise|task|query|search|request|question|q|topic|subject][:| -]
[tell me|say|show me|give me|let me know|let me see|teach me|remind me|inform me][,|:|]
[maybe|perhaps|possibly|surely|certainly] you [know|can help|can tell me|have an idea|can say][:|,|.]
[if you can|if you know|if possible|if you have time|when you have a moment|in a few words|in short|in one line|in a sentence][,|:]
[my turn|your turn|round two|new topic|other topic|something else|something different|different question|change of subject][:|.|,]
[again|once more|one more time|another time|same game|as before|like before][:|,|.]
"""

ENDINGS = """
please
[thanks|thank you|thx|cheers|many thanks|thanks a lot|thank you so much|thanks in advance|ty]
[for me|for us|for my notes|for the class|for a friend|for my kids|for my homework]
[in short|briefly|quickly|in a few words|in one line|in one sentence|in simple words|in plain words|in plain English|shortly]
[again|now|today|right now|at the moment|this time|once more|as well|too]
[if you can|if you know|if possible|if you don't mind|if you have time|when you can|by any chance]
[I forgot|I don't know|no idea|I can't remember|I never knew|I am not sure|I always forget|I have no clue]
[ok|okay|right|yes|eh|huh|or|hm|you know]
[do you know|can you tell me|can you say|any idea|can you help|could you tell me|would you know]
[it is for|it's for|I need it for|this is for] [school|work|a quiz|a friend|my homework|a test|my book|fun|a crossword|my exam|a letter]
[I|we] [read it|saw it|heard it|need it|found it|came across it] [in a book|today|yesterday|at work|online|in a text|somewhere|in the news]
[my|our] [teacher|friend|boss|son|daughter|mother|neighbour|brother|sister|colleague] [asked|wants to know|said it|uses it|used it|told me]
[and make it short|keep it short|just the answer|no long text|only one line|one line is enough|short answer please|just curious|just asking]
[sorry for asking|sorry for the question|sorry if that is silly|hope that is ok|that would help|that would be great|would be nice|I would be glad]
"""

DEFINE = """
[what|what exactly|wat|so what|what on earth|what precisely] [does|would|might|could|can|did] [|the word|the term|the expression|this word:] {} [mean|stand for|refer to|signify|describe|denote|say|express|actually mean|really mean|mean exactly|even mean|mean in English|tell us]
[what|what exactly|what precisely] [is|was|are] [|a|an|the|this|meant by|understood by|the meaning of|the definition of|the sense of|the word|the term|a so called|the idea of|the concept of|the point of] {}
[what's|whats|what s|wats] [|a|an|the|meant by|the meaning of|the definition of|the word|the sense of] {}
[define|explain|describe|clarify|interpret|illustrate|paraphrase|elaborate on|comment on|gloss|explain to me|describe to me|break down|outline|characterise] [|the word|the term|the expression|the meaning of|the concept|the notion of|the idea of|what is meant by] {}
[look up|check|find|search|search for|show|show me|open|get|get me|fetch|give|give me|list|print] [|the word|the term|the entry|the entry for|the meaning of|the definition of|the dictionary entry for|the explanation of|a definition of|an explanation of|the sense of] {}
[tell me|say|let me know|teach me|inform me|remind me|show me|explain] [about|what|something about|a bit about|more about] [|the word|the term] {} [|is|means|stands for|is about|could mean]
[tell me|say|explain|show me|let me know|teach me|write down|I want to know|I need to know|I'd like to hear|I forgot|find out|guess] what [|a|an|the|the word|the term] {} [is|means|stands for|refers to|signifies|could be|might mean|would mean|was|actually means]
[the|a|] [meaning|definition|explanation|sense|description|interpretation|gloss|translation to plain words] [of|for|behind] [|the word|the term|the expression] {}
{} [definition|meaning|explained|explanation|means|means what|is what|what is it|what does it mean|what is that|meaning please|define|in plain words|in other words|in one sentence|what's that|what that|defined]
[how|how exactly] [do|would|can|could|should] [you|we|people|I|one|they|the dictionary|a dictionary] [define|explain|describe|understand|interpret|use|read|paraphrase] [|the word|the term|the expression] {}
[how] [is|was|can|could] [|the word|the term] {} [defined|explained|described|to be understood|understood|used|meant|paraphrased]
[the|] [word|term|noun|verb|expression|entry|vocabulary] [is|:|would be|I mean is|in question is|I need is|today is] {}
[word|term|meaning|define|definition|explain|dictionary|lookup|vocab|vocabulary]: {}
[I|we|you] [don't know|do not know|don't understand|never heard of|never understood|don't get|need|have to learn|want to understand|am looking for|read|saw|stumbled over|came across|am learning|have trouble with|struggle with|wonder about] [|the word|the term|the meaning of|the expression] {}
[help me|help me out|I need help|I need some help|a little help] [with|to understand|understanding|to learn|to explain|explaining] [|the word|the term|the meaning of] {}
[is there|do you have|have you got|got] [a|any|some] [definition|meaning|explanation|entry|sense|information|idea] [of|for|about|on] [|the word|the term] {}
[what|which] [meaning|definition|sense|explanation] does [|the word|the term] {} [have|carry|possess]
[what] do [people|they|you|experts|writers|we] [mean|understand|say|want to say|call it] [by|with|when they say|when they use|when they write|if they say] [|the word|the term] {}
[someone|somebody|my friend|my boss|the teacher|a man|she|he|they] [said|wrote|used|mentioned|called me|talked about|spoke of] [|the word|something like] {} [|, what is that|, what does it mean|, what could that be|. what is it|. what does that mean|, please explain]
[if|when|suppose] [somebody|someone|I|you|they|people|a person] [says|say|writes|write|uses|use|reads|read] {} [, what is meant|, what does that mean|, what do they mean|, what is it|then what is meant]
[what about|how about|and|now|next|same for|and now|and what about|then] [|the word|the term] {}
[put|say|express|write|give|restate] {} [in other words|in plain words|in simple words|differently|in a sentence|in simple terms|more simply]
[could|would|can|might|should] {} [mean something|be explained|be defined|have a meaning]
[is] {} [a word|a real word|an English word|in your dictionary|known to you|something you know][ and what does it mean|, what does it mean|, and what is it|]
[do|did] you [know|remember|understand|have|recognise] [|the word|the term|the meaning of|what is meant by] {}
[make|let] me [understand|learn|see] [|the word|the term|the meaning of|what is] {}
[the thing|the thing called|something called|that thing] {}, [what is it|what is that|explain it|describe it|what does it mean]
{}: [what is it|meaning|what does it mean|please explain|definition please|explain|a word for my list|what is meant]
[your|a|one] [definition|explanation|short explanation|one line explanation] [of|for] {}
"""

WORD_FOLLOWUP = """
[and|what about|how about|and what about|and now|now|next|then|same for|also|plus|and also|another one:|next word:|or] {}
{} [too|as well|then|next|now|also]
"""

COMMAND = """
[what|what exactly] [does|would|can|might|will] [the|] [command|shell command|linux command|unix command|program|tool|terminal command|cli tool] {} [do|do exactly|really do|actually do|do for me|accomplish|perform|do on linux]
[what] [does|can|will] {} do [in the shell|in the terminal|on linux|on the command line|in bash|on unix|as a command|in a terminal]
[what is|what's|whats|explain|describe|define|tell me about|show|look up|help with|help me with|what about|how about|tell me something about|information on] [the|] [command|shell command|linux command|unix command|program|terminal command|tool] {}
[what is|what's|explain|describe|tell me about] {} [in the shell|in the terminal|on linux|on the command line|in bash|as a command|for in linux]
[what is|what's] [the|] [command|shell command|program|linux command] {} [for|good for|used for|about|there for|meant for]
{} [command|linux command|shell command|in linux|in bash|on linux|in the terminal|on the command line|command what does it do|command explained|command purpose]
[the|] [command|linux command|shell command|terminal command|unix command] {} [|does what|is what|explained|purpose|usage|what is it for|what does it do]
[when|why|how] [do|would|should|can] [I|you|we|people|one] [use|need|run|call|type] [the|] [command|shell command|linux command|program|tool] {}
[what happens|what will happen] [when|if] [I|you|we] [run|type|enter|call|execute|use] [the command|the shell command|the program|the linux command] {}
[purpose|use|function|job|meaning|task|role] of [the|] [command|shell command|linux command|unix command|program] {}
[command|shell|linux|bash|terminal|unix|cmd]: {}
[I|you|we] [typed|ran|found|saw|used|entered] [the command|the shell command|the linux command] {}, [what does it do|what did it do|what is it for|what is that|explain it]
[do|did] you know [the|] [command|linux command|shell command] {}
[tell me|say|explain|show me|let me know] what [the command|the shell command|the linux command|the program] {} [does|is for|is good for|is used for|is]
[is there|do you have] [a description|an explanation|help|a summary] [of|for|on] the [command|shell command|linux command] {}
"""
COMMAND_BARE = """
[what does|what would|what can|what will|what exactly does] {} [do|do exactly|actually do]
[what is|what's] {} [for|good for|used for]
[tell me|explain|say|show me] what {} [does|is for|is used for]
[when|why] [do|would|should] [I|you|we] [use|need|run] {}
[what happens] [when|if] [I|you] [run|type|enter|execute] {}
[usage|purpose|use|job] of {}
"""
COMMAND_REVERSE = """
[which|what] [command|shell command|linux command|program|tool|unix command] {}
[which|what] is the [command|shell command|linux command|program] that {}
[name|tell me|give me|show me|I need|find|I look for|I am looking for|is there] [the|a] [command|shell command|linux command|program|tool] [that|which] {}
[the|a|] [command|shell command|linux command|program] [that|which] {}
"""

PYTHON = """
[what|what exactly] [does|would|can|might|will] [|the python function|the function|python's|python] {} [do|do exactly|return|actually do|do in python|accomplish]
[what is|what's|whats|explain|describe|define|tell me about|look up|show|help with|help me with|document|what about|how about|tell me something about|information on] [|python's|the python function|the python name|python] {} [|in python|from python|from the python library]
[what is|what's] [|python's|python] {} [for|good for|used for|about|there for] [|in python]
{} [python|in python|python docs|python help|in python explained|python meaning|docs|documentation|help|doc|what does it do|explained]
[python|in python|python docs|python help|doc|help|pydoc|python function]: {}
[python|in python] {} [|what does it do|what is it|explained|meaning|usage]
[in python|python], [what does|what is|what's|explain|describe|how do I use] {} [|do|for|mean]
[when|why|how] [do|would|should|can] [I|you|we|one] [use|need|call] {} [|in python|in my python code|in a python script]
[purpose|use|function|job|meaning|documentation|description|docs] of {} [|in python|in the python library]
[what happens] [when|if] [I|you|we] [call|use|run] {} [|in python|in python code]
[tell me|say|explain|show me|let me know] what {} [does|is|is for|returns] [|in python]
[the|] [docs|documentation|doc string|help text|description|summary] [for|of|on] {} [|in python]
[do|did] you know [|python's|the python function] {}
[I|we] [saw|found|read|use|used|have] {} in [some|a|my|this] [python|python code|python script|script in python], [what does it do|what is it for|what is that|explain it]
"""

CAPITAL = """
[what|which|what city|which city|what town|what exactly] is [the|] [capital|capital city|main city|seat of government|government city] [of|in|for] {}
[what's|whats|name|tell me|give me|say|I need|show|find|look up|do you know|remind me of|guess] [the|] [capital|capital city|seat of government] [of|in|for] {}
[the|] [capital|capital city|capitol|main city] [of|in|for] {}
{} [capital|capital city|'s capital|and its capital|has which capital|capital name|has what capital]
[what|which] [capital|capital city] does {} have
[where|in which city|in what city] [is|does|sits] [the government of|the parliament of|the government in] {} [|sit|located|meet]
[which|what] city is {}'s capital
[capital|capital city]: {}
"""
CURRENCY = """
[what|which] [is|was] [the|] [currency|money|official currency|national currency] [of|in|for|used in] {}
[what's|whats|name|tell me|give me|say|I need|show|find|look up|do you know] [the|] [currency|money|official currency|national currency] [of|in|for|used in] {}
[the|] [currency|money|official currency] [of|in|for] {}
{} [currency|money|'s currency|currency name|has which currency|uses which currency|uses what money|and its currency]
[what|which] [currency|money|coins] [does|do] {} [use|have|pay with]
[what|which] [currency|money] [is|are] [used|spent|valid|accepted|official] in {}
[how|with what|with which money|with what money] do [people|they|you|I|we] pay in {}
[with what|with which money|what do I use] [to pay|to buy things] in {}
currency: {}
"""
CONTINENT = """
[on|in] [which|what] [continent|part of the world] [is|lies|can I find] {}
[which|what] [continent|part of the world] is {} [on|in|part of|located on|found on]
[what's|what is|name|tell me|give me|say|find|look up|do you know] [the|] [continent] [of|for] {}
[the|] continent [of|for] {}
{} [continent|'s continent|is on which continent|lies on which continent|is in which continent|belongs to which continent]
[what|which] continent does {} [belong to|lie on|sit on|have]
[where in the world|where on the globe|where on earth] is {}
continent: {}
"""
CALLING = """
[what's|what is|name|tell me|give me|say|I need|show|find|look up|do you know] [the|] [dialling code|dialing code|phone code|calling code|phone prefix|telephone code|country calling code] [of|for|in] {}
[the|] [dialling code|dialing code|phone code|calling code|phone prefix|telephone code] [of|for|in] {}
{} [dialling code|dialing code|phone code|calling code|phone prefix|telephone code]
[what|which] [number|code|prefix] do I [dial|call] [for|to reach|to call|to phone] {}
[how|with which code|with what prefix] do I [call|phone|ring|dial] {}
[what|which] [dialling code|phone code|calling code|phone prefix] does {} [have|use]
"""
DOMAIN = """
[what's|what is|name|tell me|give me|say|I need|show|find|look up|do you know] [the|] [internet domain|top level domain|web domain|domain|tld|domain ending|internet ending] [of|for|in|used in] {}
[the|] [internet domain|top level domain|web domain|domain|tld|internet ending] [of|for|in] {}
{} [internet domain|top level domain|domain|tld|web ending|internet ending]
[what|which] [domain|internet domain|tld|web ending] does {} [have|use]
[what do|how do] [websites|web addresses|sites|internet addresses] [in|from|of] {} end [with|in|]
"""
POPULATION = """
[what's|what is|tell me|give me|say|I need|show|find|look up|do you know] [the|] [population|population size|number of inhabitants|number of people] [of|in|for] {}
[the|] [population|number of inhabitants|number of people] [of|in|for] {}
{} [population|population size|inhabitants|number of people|has how many people|has how many inhabitants]
how many [people|inhabitants|citizens|humans|residents] [live in|are there in|are in|does|has] {} [|have]
[how] [populous|big in people] is {}
"""
AREA = """
[what's|what is|tell me|give me|say|I need|show|find|look up|do you know] [the|] [area|land area|surface area|size in square kilometres|surface] [of|for] {}
[the|] [area|land area|surface area|size] [of|for] {}
{} [area|land area|surface area|size in square km|size]
how [big|large] is {} [|in square kilometres|in square km|in area|by area]
how many square [kilometres|kilometers|km] [has|does|is] {} [|have|cover]
"""
NEIGHBOURS = """
[what|which|who] are [the|] [neighbours|neighbors|neighbouring countries|neighbour countries|bordering countries] of {}
[name|list|tell me|give me|say|show|find|look up|do you know] [the|] [neighbours|neighbors|neighbouring countries|bordering countries|border countries] of {}
[the|] [neighbours|neighbors|neighbouring countries|bordering countries] of {}
{} [neighbours|neighbors|neighbouring countries|borders which countries|borders]
[which|what] countries [border|touch|surround|are next to|lie around|share a border with] {}
[with|on] which countries does {} [border|share a border|have a border]
[who|which countries] [borders|lie next to|is next to] {}
"""
CAPITAL_REVERSE = """
[which|what] country [has|has got|owns|uses] [the capital|as capital|as its capital|the capital city] {}
{} is [the|] [capital|capital city] of [which|what] country
[of|in] [which|what] country is {} the [capital|capital city]
[whose|which country's] [capital|capital city] is {}
[name|tell me|say|find|do you know] the country [with|whose] [the capital|capital is|capital city] {}
what is {} the [capital|capital city] of
"""
CAPITAL_CHECK = """
is {city} the [capital|capital city] of {}
is the [capital|capital city] of {} [|called|named] {city}
is {city} {}'s capital
{city} is the capital of {}, [right|correct|true|yes|isn't it|is that right]
[is it|am I|I think it is] [true|right|correct] that {city} is the capital of {}
does {} have {city} as [its|] capital
"""
CITY = """
[where|in which country|in what country] [is|lies|can I find] [|the city|the town] {} [|located|to be found]
[which|what] country is [|the city|the town] {} in
{} is in [which|what] country
[tell me|say|do you know|find|look up|show me] where [|the city|the town] {} [is|lies|is located]
[where's|wheres] [|the city] {}
[locate|find] the city {}
[country|location] of the city {}
[to] [which|what] country does [|the city|the town] {} belong
"""
STATE = """
[what's|what is|tell me|give me|say|find|look up|do you know] [the|] [code|short code|abbreviation|postal code|short form|two letter code] [of|for] [|the state|the us state] {}
[the|] [code|short code|abbreviation|postal abbreviation|short form] [of|for] [|the state] {}
{} [state code|abbreviation|short code|us state code]
how is [|the state] {} [abbreviated|shortened]
[which|what] [code|abbreviation|letters] does [|the state] {} have
"""
STATE_REVERSE = """
[which|what] [|us] state [is|has the code|has the abbreviation|goes with|belongs to|uses the code] {}
[what] does the state code {} [mean|stand for]
[state|us state] [with code|with the code|code|called] {}
the state [with|behind] the [code|abbreviation] {}
{} is [which|what] [|us] state
"""

SYMBOL = """
[what's|what is|name|tell me|give me|say|I need|show|find|look up|do you know] [the|] [symbol|chemical symbol|abbreviation|short form|element symbol] [of|for] [|the element] {}
[the|] [symbol|chemical symbol|abbreviation|short form|element symbol] [of|for] [|the element] {}
{} [symbol|chemical symbol|abbreviation|element symbol|has which symbol|in symbols]
[what|which] [symbol|chemical symbol|letters] does [|the element] {} have
how is [|the element] {} [written|abbreviated] in [chemistry|the periodic table|formulas]
"""
ATOMIC_NUMBER = """
[what's|what is|name|tell me|give me|say|I need|show|find|look up|do you know] [the|] [atomic number|proton number|number of protons|element number|order number] [of|for|in] [|the element] {}
[the|] [atomic number|proton number|number of protons|element number] [of|for] [|the element] {}
{} [atomic number|proton number|number of protons|has which number|number in the periodic table]
how many protons [does|has|are in] [|the element] {} [|have]
[which|what] [number|atomic number] [does|has] [|the element] {} [have|have in the periodic table|]
[where|at which number|at what number] in the periodic table is {}
"""
ATOMIC_MASS = """
[what's|what is|name|tell me|give me|say|I need|show|find|look up|do you know] [the|] [atomic mass|atomic weight|mass|relative atomic mass] [of|for] [|the element] {}
[the|] [atomic mass|atomic weight|relative atomic mass] [of|for] [|the element] {}
{} [atomic mass|atomic weight|relative atomic mass]
how [heavy|much] [is|weighs] [an atom of|one atom of|an atom|a single atom of] {}
[which|what] [atomic mass|atomic weight|mass] does [|the element] {} have
"""
ELEMENT_BY_NUMBER = """
[what|which] [is|element is] [element|the element|element number|number|the element with number|the element with the atomic number] {}
[which|what] element has [the|] [number|atomic number|proton number] {}
[name|tell me|give me|say|find|show|do you know] [the element with number|element|element number|the element with atomic number] {}
[element|element number|the element with number|atomic number] {} [|please|which element|is which element]
[which|what] element has {} protons
"""
ELEMENT_BY_SYMBOL = """
[which|what] element [has|uses|goes by|is written with] [the|] [symbol|chemical symbol|abbreviation|letters] {}
[which|what] element is {} [|in chemistry|in the periodic table|the symbol of]
[what] does the [symbol|chemical symbol] {} [mean|stand for]
[name|tell me|say|find|give me|do you know] the element [with|behind] [the symbol|the letters] {}
{} is [the|] [symbol|chemical symbol] of [which|what] element
[symbol|chemical symbol|element symbol] {} [|belongs to|is which element|which element]
"""

SUM = """
[what's|what is|whats|how much is|how much are|how many is|what are|what do you get for|what comes out of|what makes|do you know what is|tell me what is] {} [|equal to|together|in total|in all|as a number]
[compute|calculate|work out|solve|evaluate|determine|find|give me|tell me|tell me the result of|add up|do|figure out|reckon|count|show|say] [|the result of|the value of|the answer to|the sum|this:] {}
{}
{} [=|= ?|is|is what|equals|equals what|makes|makes what|gives|results in|is how much|result|answer]
[the|] [result|answer|value|solution|outcome] [of|to|for] {}
[I|we|you] [need|want|have|get|must compute|have to calculate|want to know|can't work out|need to know] {}
[can|could|would] you [compute|calculate|work out|solve|do|tell me] {}
[sum|maths|math|calculation|problem|exercise]: {}
[if|when] I [compute|calculate|take|have|type] {}[, what do I get|, how much is that|, what is the result| what comes out]
"""
CONVERT = """
[what's|what is|how much is|how much are|how many is|whats] {} [in|expressed in|converted to|measured in|as] {to}
[convert|change|turn|translate|transform|express|recalculate|put] {} [to|into|in] {to}
{} [in|to|into|as|=] {to}
[how many|how much] {to} [are|is|are in|are there in|make|make up|fit in|do I get for|equal|correspond to] {}
{} [is|are|equals|makes] [how many|what in|how much in] {to}
[I|we] [need|want|have|have got|must know] {} [in|converted to|as|expressed in] {to}
[give me|tell me|show me|say|work out|calculate|compute] {} in {to}
"""

TELL = """
[my|my own] {k} [is|is called|would be|will be|happens to be|of course is] {v}
[remember|note|please note|note down|keep in mind|don't forget|please remember|write down|memorise|store|save|remember this|remember that|please keep in mind][:| that|,] my {k} is {v}
my {k}: {v}
[I|let me] [tell|want to tell|give] you my {k}: [it is|it's|] {v}
[for later|just so you know|for the record|fyi|by the way|btw|you should know|for your information][:|,] my {k} is {v}
[you can write|you may note|note|keep] {v} [as|for] my {k}
{v} is my {k}
[I have|I've got] a {k}, [it is|it's|namely] {v}
[as for|about|concerning|regarding] my {k}[, it is|: it is|, that is|:] {v}
[this is|here is|here comes|that is] my {k}: {v}
"""
TELL_NAME = """
[I am|I'm|im|this is|call me|you can call me|they call me|people call me|my friends call me|I am called|everyone calls me|just call me|it's me,|here is] {v}
[hi|hello|hey|good morning|good evening][,|!|] [I am|I'm|im|this is|my name is|my name's] {v}
[my|the] [first|] name [is|'s] {v}
"""
ASK = """
[what is|what's|whats|what was|tell me|say|repeat|recall|do you know|do you remember|can you remember|do you still know|can you tell me|remind me of|give me|I forgot|name|show me|you know|what did I say is|what do you have as|please say|who knows] my {k}
my {k} [|please|again|was|is|is what|was what|once more|what is it|what was it]
[which|what] {k} [did I|have I] [tell you|give you|mention|say|told you|given you|mentioned|name]
[the|that] {k} [I gave you|I told you|I mentioned|of mine|from before|from earlier]
[do you|can you|could you] [recall|remember|repeat|tell me|say|find|name] [what|] my {k} [|is|was]
"""
ASK_NAME = """
[who am I|what am I called|how am I called|what do people call me|do you know who I am now|what do you call me|what should you call me]
"""
CORRECT = """
[no|sorry|oh no|wait|oops|correction|wrong|no no|hold on|I was wrong|my mistake|I made a mistake|not quite|stop|ah no][,|.|:|!] [I meant|it is|it's|I mean|make it|make that|it should be|it must be|rather|better|I meant to say|my {k} is|my {k} is really|the {k} is] {v}
[actually|in fact|to be honest|on second thought|well actually|now][,|] my {k} is {v} [|now|instead]
[change|correct|update|set|fix] my {k} to {v}
[forget that|forget it|never mind that|scrap that][,|.|:] my {k} is {v}
my {k} [has changed to|changed to|is now|is no longer that but|is really|is rather] {v}
"""
WHAT_ASKED = """
[what did I|what have I] [just ask|ask you|ask last|asked last|say before|ask before|just say|ask a moment ago|just asked]
[repeat|say again|what was] my [last question|previous question|last message|question]
[which question did I ask|what was the question|what was the last question|which was my last message]
"""
REPEAT = """
[say that again|repeat that|repeat|again|once more|say it again|can you repeat that|could you repeat that|repeat your answer|what did you say|what was your answer|sorry what|come again please|please repeat|one more time|tell me again|repeat the last answer]
"""
FIRST_WORD = """
[which|what] word did I ask [first|about first|you first]
what was [the first word|my first word|the first word I asked|the first word I asked about]
[the|my] first word [I asked|please|again|was]
"""

NEEDLE = """
the code for {} is {v}.
the code of {} is {v}.
code for {}: {v}.
remember, the code for {} is {v}.
note that the code for {} is {v}.
for {} the code is {v}.
{} has the code {v}.
the number for {} is {v}.
by the way, the code for {} is {v}.
use {v} as the code for {}.
the secret code of {} is {v}.
whoever asks: the code for {} is {v}.
the entry code for {} reads {v}.
for the record, {} has the code {v}.
my note says the code for {} is {v}.
the code that belongs to {} is {v}.
"""
NEEDLE_ASK = """
[what|which] is the [code|secret code|entry code|number] [for|of|that belongs to] {}
[what's|tell me|say|give me|find|look up|I need|repeat|show] the [code|secret code|number] [for|of] {}
[which|what] [code|number] [has|belongs to|goes with|was given for] {}
[the|] code [for|of] {} [|please|again]
[do you|can you] [remember|find|see|recall|tell me] the code [for|of] {}
{} [code|has which code|code please]
[according to the text|in the text above|from the text|in the above], [what|which] is the code [for|of] {}
"""

# Words that carry no topic: soups of them surround a key, so that no fixed phrase is needed to find it.
PLAIN = """
what does is the a an of for to me you I we it this that please tell say explain define mean means meaning word term so now then and also just only quick question about know need want help can could
would will should do did have has had give show look find check like maybe perhaps again next here there how when why who which some any one more my your our their again once today thanks thank ok okay well hmm
um uh yes no not really actually simply in on with from by as at if but or because when something anything exactly short simple plain sentence line answer entry dictionary lookup sense definition stuff thing
called named read heard saw found got let us see try think wonder guess sure right fine good nice very much little bit long time wanted asking asked ask told said english translate interpret describe clarify understand
""".split()

# Sentences around a question; {w} is any word. They make two-sentence messages and teach that other content words are not the key.
STORIES = """
[I|we|my friend|the teacher|my boss|a man|she|he] [was|were|is|am] [reading|talking|thinking|writing|dreaming|arguing] about [the|a|some|] {w} [and|or|with] [the|a|] {w}.
[my|the|our|a|that|this] {w} [is|was|looks|seems|became|stays|gets] [very|quite|too|so|rather|really|] {w} [|today|again|now|at night|in summer].
[yesterday|today|last week|this morning|last night|on monday] [I|we|they|someone] [saw|met|found|bought|lost|ate|heard|read] [a|the|some|one|two] {w} [|and a {w}|in the {w}|near the {w}|without a {w}].
[it|that|this] was [a|the|about a|like a] {w} [|of {w}|for the {w}|with {w}|on the {w}].
[it|this|that] [is|was] [in|from|on|for] [a|my|the] [text|book|article|letter|film|song|lecture|class|game|poem] about [the|] {w}.
[I|we] [like|love|hate|need|want|have|know|miss|collect] [the|a|some|my|] {w} [|very much|a lot|and {w}|but not {w}].
[the|a] {w} [and|or] the {w} [are|were] [here|there|gone|fine|the same|in the {w}].
[there|here] [is|was] [a|the|one|no] {w} [in|on|under|near|behind] [the|my|a] {w}.
[you|I|we] [can|must|should|could|may] [|not] {w} [the|a|my] {w} [|with a {w}|before the {w}].
[do|did] [you|we|they] [like|see|want|have|know] [the|a|my] {w}? [|never mind.|anyway.|no matter.]
[the text|the sentence|the line|it|my book] [says|reads|goes]: [the|a] {w} [|of the {w}] [is|was|has|will] [the|a|no|] {w} [|in {w}].
[long|short|funny|strange|old|nice] [story|day|book|text|sentence] [about|with|of] [a|the] {w}[.|,] [|and {w}.]
"""

# Everyday words of requests: noise around a key is drawn from here, so that no single carrier word is ever a surprise.
CARRIER: tuple[str, ...] = tuple(sorted(set("""
able about above absolutely accurate across actual add advice afraid after afternoon ago agree ahead all almost alone along already alright although always amazing among and announce annoying another anybody anyhow anyone
anything anyway apart apparently appear appreciate approach around article aside assist assume assuming author available aware away awesome awful back background bad barely based basic basics basically be bear beat because
become been before beginner begin behind being believe below bet better between beyond big bit blank blog book bored both bother brain break brief briefly bring broad brother brush buddy business busy buzz came care careful
carry case casual catch certain chance change chapter chat cheat check child choose claim class clean clear clearly clever close clue coach coffee colleague column come comes comfortable coming comment common compare
complete completely complicated concept concise confess confuse confused confusing consider context conversation cool correct could count couple course cousin crack crazy crossword curious current dad daily dare date
daughter day dead deal dear decent decide deep degree depth describe desk despite detail details dictionary difference different difficult dig direct discuss doc document doubt down draft draw drop dude dumb dummy during each
earlier early easily easy edit editor educate either elaborate else email encounter end english enjoy enlighten enough entire especially essay even evening ever every everybody everyone everything everywhere evidently exact
exam example excellent exist expect expert express extra fact fair fairly fall familiar family fancy far fascinating fast favor feel feeling few figure file fill final finally find finish first fit fix flash folks follow forgive form
former forward free fresh friend from full fun funny further game gather general generally gentle genuine gets giant girl given gives glad glance glossary goes going gonna gotta grab grade grammar grandma grandpa grasp grateful
great group guide guy guys half hand handy hang happen happy hard hardly head headline hear hell helpful hence hey hidden high hint hints history hit hold home homework honest hope hopefully hour huge humble hundred hurry idea ideal
ignorant imagine impossible include indeed info informal informed insight instance instead intend interest interested interesting internet into introduce intro involve issue item jargon job joke journal judge jump just keep kid
kids kind knowledge known language large last late lately later laugh layman lead learn least leave lecture lesson letter level library lie life light likely limit listen literally live load local lol lost lot lots loud love low lowdown
luck lucky lunch mad magazine mail main make manage mark market master matter maybe meant meanwhile memo memory mention mess message middle might mind minute miss missing mistake mix moment month mood moreover morning mostly mother
move much mum must name native near nearly neat need neither never new newbie news newspaper nice night nobody none noob nor normal normally note notes notebook nothing notice novel now number obscure obvious obviously odd offer often
old once only open opinion option order ordinary other otherwise ought out outline over overall own page paper paragraph pardon parent part particular pass passage past patient pause pay people perfect perhaps person phrase pick picture
piece place plain plan play pleasant plenty plot point polite pop possible post practice practical precise precisely prefer prepare present pretend pretty previous probably problem professor project promise proper properly proud
prove provide public pupil purpose put puzzle puzzled puzzling quarter quickly quiet quit quite quiz quote random rare rather reach reader reading ready real reality realise really reason recall recent recently recap refer reference
refresh refresher regard regarding regular related rely remark remind repeat reply report request require research resource respond rest result review riddle ring role roughly round run sadly safe same save say saying scholar school
science screen script search season second section seek seem seems seen sense serious seriously serve several shall shame share shed sheet shoot shop short shortly shot shout show side sign silly similar simplify simply since single
sister sit site situation skip slang sleep slight slow slowly smart smooth social sorry sort sound source speak special specific speech spell spend spill spot stage stand start state statement stay step still story straight strange
stranger street strong struggle stuck student study stuff stumble stupid style subject such suddenly suggest suit sum summary super suppose supposed surely surprise tab table tackle take tale talk target task teach teacher teaching team
technical teen tell tend term terms terrible test text textbook thank theme theory therefore thesis thick thing thinking third though thought thousand thread through throw till time tiny tired title together tomorrow tone tonight took
top topic total touch tough toward track translate tricky trouble true trust truth tutor tutorial tv twice type typical uncle unclear under unfamiliar unfortunately university unknown unless unsure until unusual update usage use used
useful user usual usually vague various version very video view vocabulary wait walk wanna want watch way weak website week weird welcome went whatever whenever wherever whether while whisper whoever whole whose wife wiki wild will wise wish
within without wonder wondering word work world worry worth wow write writer writing wrong yeah year yep yesterday yet young yours yourself zero
""".split())))

DEFINE = DEFINE.rstrip("\n") + """
[yo|hey man|dude|mate|buddy|pal|bro|sis|folks|guys|boss|chief|captain|doc|professor|teacher], [what's|what is|explain|define|tell me about|what about|any idea about|talk to me about] {}
[never|I have never|I've never|not once have I|rarely have I] [seen|heard|met|used|read|encountered|understood|looked up] {} [before|till today|in my life|until now|anywhere|]
[why|how come|when] [do|would|did] [people|they|writers|you|we|kids|experts|folks] [say|use|write|talk about|love the word|call things] {}
[explain|describe|define|break down|clear up|simplify|unpack|spell out|walk me through|shed some light on|enlighten me on|fill me in on|brief me on|educate me on|update me on|school me on] {} [|to a child|to a beginner|for a ten year old|like a teacher|like a dictionary|for dummies|as simply as you can|step by step]
[a|one] [short|quick|brief|tiny|clear|simple|good|decent|proper|concise] [note|summary|description|line|sentence|hint|answer|overview|account|introduction|word] [on|about|for|regarding|concerning] {}
[the basics|basics|the gist|the essence|the facts|the story|the point|the idea|the truth|the short version|the key facts|the background|the details] [of|behind|on|about] {}
[got|have|any|is there] [any idea|a clue|an idea|a hint|hints|info|insight|thoughts|knowledge|some facts] [on|about|of|what is|regarding|concerning] {}
[I'm|I am|we're|we are|my class is|my group is|they are] [stuck on|puzzled by|confused by|confused about|lost with|curious about|interested in|learning about|reading up on|writing about|working on|unsure about|not familiar with|unfamiliar with|clueless about|researching|studying] {} [|, help|, please help|, any idea|, can you assist|, what is it]
{} [is confusing me|puzzles me|confuses me|bothers me|sounds strange|sounds odd|is unclear to me|is unknown to me|makes no sense to me|is new to me|escapes me|came up in class|came up at work|was in the exam|is in my book|is on my list|is a mystery|got me thinking]
[our|my|the|this] [book|text|article|teacher|lecture|chapter|video|paper|author|story|recipe|manual|letter|professor|guide] [mentions|uses|talks about|keeps mentioning|is all about|starts with|ends with|covers|speaks of|explains badly|never explains] {} [|, what is it|, what does that mean|, can you explain|, please explain|. meaning?|. help!]
[some|a few|any] [words|facts|details|lines|hints|info|thoughts|notes] [on|about|for] {}
[to|for] [a|my] [beginner|child|friend|student|class|tourist|newbie], [what is|explain|how would you describe|define] {}
{} [for beginners|for dummies|for kids|in a nutshell|simply put|made simple|briefly|101|basics|summary|info|facts|in short|please explain|wtf|lol what|huh|hm|whats that|pls]
[spit it out|come on|go on|go ahead|shoot|hit me|ok go|quick|be quick|be honest|don't be shy][:|,|] {} [|is what|means|then]
[suppose|imagine|assume|pretend|let's say|say] [I|you|someone|a child|an alien|my boss] [asks|asked|had to know|needs to know|wants to know|does not know|never heard of] [about|what is|] {}
[is|was|could|would] {} [a thing|a person|a place|an animal|a plant|a tool|something to eat|good or bad|a kind of thing|a real thing|an object|an action] [|or what|or not|, or|, right]
[in|using|with] [simple|plain|easy|your own|clear|normal|everyday|basic|non technical|human] [words|terms|language|english], [what is|explain|define|tell me|describe|] {}
[and|but|so|ok|well] [what|who|how] [on earth|in the world|the hell|the heck|exactly|really|actually] [is|are|was] [|a|an|the] {}
[I|we|my kids] [want|need|would like|wish|hope|try|was asked|have] to [learn|understand|know|find out|figure out|explain|describe|define|look up|grasp|use] [|more about|about|what is|what] {} [|means|is]
[google|wikipedia|the internet|my dictionary|my book|nobody|my friend|the teacher] [didn't help|failed me|was no help|has nothing|could not say|is silent][,|:|.] [what is|so what is|explain|define|tell me|] {}
[question|query|clue|word of the day|today's word|next word|random word|hard word|new word|vocab|flash card|quiz|trivia|riddle][:|-| -] {}
"""
