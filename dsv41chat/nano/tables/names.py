"""Names and other values that people tell about themselves."""
from __future__ import annotations

FIRST: tuple[str, ...] = tuple("""
Anna Ben Carla David Emma Felix Gina Hugo Ida Jonas Karl Lena Mark Nina Otto Paula Quinn Rosa Sam Tina Uwe Vera Will Xena Yann Zoe Ada Boris Clara Dora Emil Frida Greta Hans Irma Jan Kai Lou Mia Noah Olga Pia Ralf Sara
Theo Ursula Viktor Wanda Alba Bruno Cora Dario Elsa Fabio Gala Henry Inga Jack Kira Leon Mona Nils Orla Pablo Ruth Simon Tara Ulla Vito Wim Yara Zora Abel Beth Cleo Dean Edna Finn Gus Hope Ivy Joel Alice Bob Charlie
Diana Eve Frank Grace Heidi Ivan Judy Kevin Linda Mike Nancy Oscar Peter Rachel Steve Tom Victor Wendy Aaron Bella Chris Daisy Ethan Fiona George Hannah Ian Julia Kate Liam Maria Nathan Olivia Paul Rita Sean Tess Vince
Amir Bao Chen Divya Elif Farid Goran Hana Ines Jorge Kenji Leila Mei Nadia Omar Priya Rashid Sofia Tariq Umar Valeria Wei Xiu Yusuf Zainab Akira Bjorn Carmen Dmitri Elena Fatima Gustav Helga Igor Jasmin Katja Lars Marta
Nikolai Oleg Petra Ravi Sven Tatiana Uma Vlad Yuki Zlatan Martin Lucy Robert Susan Thomas Laura James Emily John Mary William Sophie Daniel Jane Adam Eva Max Lisa Philip Ella Jacob Lily Louis Chloe Arthur Rose
""".split())
COLOURS: tuple[str, ...] = tuple("""red green blue yellow black white brown purple pink orange grey violet silver gold cyan beige turquoise crimson magenta indigo teal maroon navy olive
lilac scarlet ivory khaki coral lavender bronze copper mint peach ruby amber emerald azure cream tan""".split())
FOODS: tuple[str, ...] = tuple("""
pizza pasta rice bread cheese soup salad curry sushi cake chocolate tacos noodles pancakes steak fish chips beans lentils porridge omelette risotto
lasagna goulash paella dumplings apples bananas cherries grapes mangoes waffles popcorn pudding yoghurt honey tofu kebab burgers stew
""".split())
ANIMALS: tuple[str, ...] = tuple("""
cat dog horse owl fox wolf bear tiger lion eagle rabbit hamster dolphin whale penguin turtle frog snake parrot otter badger hedgehog squirrel deer
goat sheep camel llama panda koala zebra giraffe elephant lizard octopus shark bee butterfly raven swan
""".split())
