"""Short stories written for this project: they show the generator what is asked for. (request, story) pairs."""

from __future__ import annotations

EXAMPLES: list[tuple[str, str]] = [
    (
        "a boy named Tim, a red ball and a big dog",
        "One day, Tim went to the park with his red ball. He threw the ball up and caught it again and again. "
        "Then he threw it too far, and it rolled under a bench. A big dog lay next to the bench. Tim was "
        "scared. He stood still and looked at the dog. The dog looked at Tim. Then it got up, took the ball "
        'in its mouth and put it at Tim\'s feet. "Thank you!" said Tim. He threw the ball, and the dog ran to '
        "get it. They played until the sun went down. Tim was not scared of the dog anymore. He had a new "
        "friend.",
    ),
    (
        "a girl named Mia, a cake and her grandma",
        "Mia wanted to make a cake for her grandma. It was her grandma's birthday. She mixed eggs, milk and "
        "sugar in a bowl. But when she opened the cupboard, there was no flour. Mia was sad. She went to the "
        'house next door and knocked. "Do you have some flour?" she asked. The neighbor smiled and gave her a '
        "big bag. Mia ran home and made the cake. In the evening, grandma came. She took a bite and closed "
        'her eyes. "This is the best cake I ever had," she said. Mia gave a piece to the neighbor too, and '
        "they all ate together.",
    ),
    (
        "a little bird who is afraid to fly",
        "A little bird lived in a tall tree. Her brothers could fly, but she was afraid. She sat in the nest "
        'and looked down. "It is too high," she said. One night, a strong wind came and shook the tree. The '
        "nest fell! The little bird opened her wings. She did not fall. She was flying! She flew around the "
        'tree and landed on a branch next to her mother. "You did it!" said her mother. The little bird was '
        "very proud. The next morning, she was the first to fly up into the blue sky.",
    ),
    (
        "two friends, Sam and Ana, who want the same toy",
        "Sam and Ana were best friends. They played in the yard every day. One day, they found a toy truck in "
        'the grass. "It is mine! I saw it first," said Sam. "No, it is mine!" said Ana. They pulled and '
        "pulled, and a wheel came off. Now nobody could play with the truck. Ana began to cry. Sam felt bad. "
        'He got some glue from his dad, and Ana held the wheel. Together they fixed the truck. "You can play '
        'with it first," said Sam. "Let\'s play together," said Ana. They filled the truck with sand and drove '
        "it around the yard. They learned that sharing is more fun.",
    ),
    (
        "a rabbit who lost his hat",
        "There was a rabbit named Ben who loved his green hat. He wore it every day. One windy morning, the "
        'wind took the hat and blew it away. "My hat!" cried Ben. He ran over the hill. He asked the frog, '
        "but the frog had not seen it. He asked the cow, but the cow had not seen it. At last, Ben looked up "
        "into a tree. There was his hat, and in it sat three baby birds. They were warm and happy. Ben "
        'thought for a while. "You need it more than I do," he said. The mother bird sang a song for him. Ben '
        "walked home without a hat, but with a smile.",
    ),
    (
        "a boy who does not want to go to bed",
        'It was late, but Leo did not want to go to bed. "I am not tired," he said. His mom said, "Then let '
        'us look at the moon." They sat at the window. The moon was big and round. "The moon is awake too," '
        'said Leo. "Yes," said mom, "but the birds are asleep. The flowers are asleep. Even your teddy bear '
        'is asleep." Leo looked at his bear. He put it under the blanket so that it was not cold. Then he lay '
        'down next to it. "I will only keep it warm," he said. Mom turned off the light. Soon Leo was asleep '
        "too.",
    ),
    (
        "an old boat and a storm",
        'An old man had an old boat. The other men laughed at it. "Your boat is slow," they said. One day, a '
        "big storm came. The fast boats could not get back, because the waves were too high. But the old boat "
        "was strong. The old man went out into the storm. He found the men and took them all into his boat. "
        'Slowly, slowly, the old boat went home. On the shore, the men said, "We are sorry. Your boat is the '
        'best boat of all." The old man smiled. The next day, they all helped him to paint it blue.',
    ),
    (
        "a girl named Zoe who plants a seed",
        "Zoe had a small seed. She dug a hole in the garden and put the seed in. She gave it water. The next "
        'day she looked, but there was nothing. "Why does it not grow?" she asked. "You must wait," said her '
        "dad. Zoe gave it water every day. She waited and waited. Then, one morning, she saw a tiny green "
        "leaf. Zoe jumped up and down. The plant grew taller and taller, and in the summer it had a big "
        "yellow flower. A bee came and sat on it. Zoe was glad that she had waited.",
    ),
    (
        "a cat and a mouse who become friends",
        "A cat lived in a big house, and a mouse lived in the wall. Every day the cat ran after the mouse, "
        "and every day the mouse got away. One day, the cat got stuck in a box. She pulled and pushed, but "
        'she could not get out. The mouse came out of the wall. "Please help me," said the cat. "Will you run '
        'after me again?" asked the mouse. "No, I promise," said the cat. The mouse bit a hole in the box, '
        "and the cat was free. From then on, they shared the milk and slept in the sun together.",
    ),
    (
        "a girl who tells a lie about a broken cup",
        "Lucy played with a ball in the kitchen. Her mother had told her not to. The ball hit a blue cup, and "
        'the cup fell and broke. When her mother came, she asked, "Who broke the cup?" "The cat did it," said '
        "Lucy. Her mother put the cat out into the rain. The cat cried at the door. Lucy felt very bad. She "
        'could not eat her lunch. At last she said, "Mom, it was not the cat. It was me. I am sorry." Her '
        'mother hugged her. "Thank you for telling me the truth," she said. They let the cat in and dried it '
        "with a soft towel.",
    ),
    (
        "a bear who is looking for honey",
        "Big Bear was hungry. He wanted honey. He walked through the forest and sniffed. He found a tree with "
        'a bee hive in it. "May I have some honey?" he asked. "No," said the bees. "You always take all of '
        'it." Big Bear sat down and thought. He saw that the bees had no flowers near the tree. So he went to '
        'the meadow, dug up flowers and planted them around the tree. The bees were so happy! "Now you may '
        'have a little honey," they said. Big Bear took only a little. It was the sweetest honey he had ever '
        "had.",
    ),
    (
        "a boy named Max on his first day of school",
        "It was Max's first day of school. He held his dad's hand very tight. The room was full of children, "
        'and he did not know any of them. "I want to go home," he said. Then he saw a girl who sat alone. She '
        'looked sad. Max went to her. "Are you scared too?" he asked. The girl nodded. "My name is Ella," she '
        "said. Max showed her his toy car. They built a long road out of blocks. When his dad came back, Max "
        'did not want to go. "Can I come again tomorrow?" he asked. His dad laughed. "Yes, you can," he said.',
    ),
]
