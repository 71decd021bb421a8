"""Everyday words that people like to look up; each is taught when WordNet has it, whatever its rank."""
from __future__ import annotations

WANTED: frozenset[str] = frozenset("""
photosynthesis entropy serendipity gravity algorithm database ecosystem democracy philosophy metaphor irony empathy nostalgia resilience ambiguity paradox hypothesis molecule atom neutron proton electron
photon galaxy nebula asteroid comet eclipse volcano earthquake tsunami hurricane tornado avalanche glacier fjord lagoon archipelago peninsula isthmus estuary delta savanna tundra desert oasis rainforest
dinosaur mammal reptile amphibian insect arachnid crustacean mollusc rodent primate marsupial whale dolphin penguin ostrich eagle owl falcon sparrow pigeon parrot peacock swan butterfly dragonfly beetle
spider scorpion lobster octopus squid jellyfish shark salmon tuna trout giraffe elephant rhinoceros hippopotamus crocodile tortoise turtle lizard chameleon kangaroo koala panda squirrel hedgehog beaver otter
badger weasel hamster oak maple birch willow cactus orchid tulip daisy sunflower lavender moss fern fungus mushroom algae bacterium virus enzyme protein vitamin hormone insulin antibody antigen vaccine
antibiotic genome chromosome gene mutation evolution mitosis osmosis metabolism digestion respiration circulation artery vein heart lung liver kidney pancreas spleen stomach intestine skeleton skull spine rib
femur pelvis muscle tendon ligament cartilage neuron synapse brain cortex retina cornea iris pupil eardrum cochlea larynx trachea diaphragm anaemia asthma diabetes influenza measles malaria tuberculosis cancer
tumour migraine insomnia allergy arthritis pneumonia stroke surgeon dentist pharmacist physician nurse psychologist architect engineer plumber carpenter electrician blacksmith librarian journalist economist
accountant lawyer notary judge senator ambassador monarch emperor pharaoh knight samurai pirate sailor astronaut pilot piano violin cello trumpet trombone flute clarinet oboe bassoon saxophone guitar harp drum
accordion harmonica organ symphony sonata opera concerto melody harmony rhythm tempo chord ballad sonnet haiku limerick novel fable allegory satire tragedy comedy epilogue prologue alphabet consonant vowel syllable
grammar adjective adverb noun pronoun preposition conjunction verb synonym antonym homonym acronym anagram palindrome alliteration onomatopoeia hyperbole oxymoron euphemism simile pun cliche idiom proverb triangle
square rectangle rhombus trapezoid pentagon hexagon octagon circle ellipse parabola hyperbola sphere cube cone cylinder pyramid prism tangent radius diameter circumference hypotenuse algebra geometry calculus
trigonometry arithmetic fraction numerator denominator integer logarithm exponent matrix vector probability median average telescope microscope barometer thermometer compass sextant stethoscope camera lens
battery dynamo turbine engine piston gearbox clutch transistor semiconductor laser radar sonar satellite rocket helicopter submarine locomotive bicycle tractor bulldozer crane elevator escalator refrigerator
dishwasher umbrella lighthouse windmill aqueduct cathedral castle fortress dungeon skyscraper igloo tent bridge tunnel canal dam reservoir harbour lantern candle chandelier hammer screwdriver chisel pliers wrench
anvil saw axe shovel rake scythe sickle plough needle thimble loom spindle silk cotton wool linen velvet leather denim cinnamon saffron ginger garlic onion potato tomato cucumber pumpkin spinach broccoli cauliflower
asparagus artichoke avocado pineapple banana mango papaya raspberry strawberry blueberry cherry apricot peach plum walnut almond hazelnut pistachio chestnut omelette pancake waffle croissant dumpling noodle spaghetti
sausage mayonnaise mustard vinegar honey syrup caramel chocolate espresso lemonade champagne whisky monsoon drought blizzard thunder lightning rainbow mirage aurora horizon equinox solstice equator latitude longitude
meridian hemisphere atmosphere ozone oxygen hydrogen helium carbon nitrogen mercury granite marble limestone sandstone basalt quartz diamond emerald ruby sapphire amber pearl coral ivory fossil mineral crystal ore
alloy bronze brass steel magnet electricity voltage resistance conductor insulator friction inertia momentum velocity acceleration kinetic potential pressure density buoyancy viscosity catalyst acid alkali solvent
isotope ion polymer plastic rubber gasoline kerosene coal uranium radiation fusion fission monarchy republic dictatorship oligarchy anarchy feudalism capitalism socialism communism liberalism fascism nationalism
imperialism colonialism parliament congress senate constitution referendum election ballot veto treaty embargo tariff inflation recession mortgage dividend bankruptcy monopoly auction invoice tax pension insurance
optimism pessimism altruism egoism stoicism hedonism cynicism scepticism nihilism existentialism utilitarianism ethics aesthetics epistemology metaphysics ontology logic rhetoric dialectic dogma heresy theology
monotheism polytheism atheism agnostic pilgrimage monastery mosque synagogue pagoda temple shrine altar psalm sermon baptism courage honesty modesty humility patience generosity gratitude jealousy envy greed pride
anger sorrow grief joy bliss melancholy euphoria anxiety phobia obsession curiosity wisdom intuition instinct consciousness memory dream nightmare hypnosis procrastination perseverance integrity diligence
chess checkers dominoes poker cricket tennis badminton volleyball basketball hockey fencing archery wrestling judo karate marathon javelin discus gymnastics trampoline skiing surfing kayak canoe yacht catamaran
software hardware compiler interpreter keyboard monitor printer scanner modem router server network internet browser website password encryption byte pixel bug cursor folder spreadsheet bitmap robot android
library museum gallery theatre stadium university kindergarten orphanage hospital pharmacy bakery butcher grocery market bazaar souvenir passport luggage suitcase itinerary odyssey labyrinth riddle enigma quest
""".split())
