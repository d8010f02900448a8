"""Real text for the tests that need some, written for them."""

TEXTS = (
    "The library opened at nine, and by ten every table near the windows was taken.",
    "Mix the flour with water and salt, knead it for ten minutes, and let it rest overnight.",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n",
    "In 1869 a chemist arranged 63 elements by weight and left gaps where none was known.",
    "Dear Sir, your letter of 14 May reached us only today; the goods were sent on the 3rd.",
    "A tide is a long wave: the Moon pulls on the near side of the Earth more than on the far one.",
    "Question: what is the capital of France? Answer: Paris. Question: and that of Italy?",
    "She counted the steps, 212 in all, and wrote the number on the back of her ticket.",
    "SELECT name, COUNT(*) FROM orders WHERE year = 2021 GROUP BY name ORDER BY 2 DESC;",
    "Rain fell for three days. On the fourth the river rose above the lower road and stayed there.",
    "To change a wheel, loosen the nuts first, then raise the car, and never work under the jack.",
    "The proof goes by induction: assume the claim for n, and add the next odd number to both.",
    "Il pleuvait sur la ville, et les passants couraient d'une porte à l'autre.",
    "Der Zug nach Wien hatte vierzig Minuten Verspätung, und niemand wusste, warum.",
    "A compiler reads text, builds a tree, and writes down what the tree means in another tongue.",
    "No one had told the old man that the ferry no longer ran, so he waited until dark.",
)
