"""Plain words for keys and lists; no word is part of another."""

_ADJECTIVES = """
amber ancient angry awkward bitter blind blunt bold brave brief bright brisk broken busy calm careful careless cheap
cheerful chilly civil clean clever clumsy coarse common complex costly cosy crisp crooked cruel curious daring decent
deep dense distant dizzy double drowsy dusty eager early easy elegant empty endless exact faint fancy fierce flat
fluent fragile frank fresh frozen gentle giant glad gloomy golden graceful grand grateful greedy grumpy handsome happy
harsh heavy helpful hidden hollow honest huge humble hungry idle jolly joyful keen large lazy lively lonely loyal
lucky lunar mellow merry mighty mild modern modest muddy narrow nasty nervous noble noisy novel obvious orderly pale
patient perfect plain pleasant polite proud purple quaint quick quiet rapid rare ready remote rigid ripe robust rough
rural rusty scarce secret selfish serene sharp shiny short shy silent silver simple sincere sleepy slender slow smooth
snug soft solemn solid sour spicy stable steady steep sticky stiff strange strict strong sturdy sudden sweet swift
tame tender thick thirsty tidy timid tired tough tranquil twin unusual urgent useful vague vast velvet violet vivid
warm weary weird wicked wide wild wise witty wooden worthy young zealous
"""
_NOUNS = """
acorn airport almond anchor ankle apple apron artist aunt autumn badge bakery balcony balloon banana banker barrel
basket beard beaver bench bicycle biscuit blanket blossom bottle bracelet branch bread breeze brick bridge brother
bucket builder bulb bundle butter button cabbage cabin cactus camel camera canal candle canoe canyon captain carpet
carrot castle cattle cave cellar chain chalk cherry chess chicken chimney cinema circle citizen cliff clock cloud
coach coast cobbler coffee collar comet compass copper coral corner cotton cousin cradle crane crayon cricket crown
crystal cupboard curtain cushion dancer daughter desert diamond dinner doctor dolphin donkey dragon drawer drum duck
eagle earring editor elbow elephant engine envelope falcon farmer feather fence ferry fiddle finger flag flute folder
forest fork fountain fox frog furnace galaxy garden garlic gate ginger giraffe glacier glove goat goose grape guitar
hammer harbour hawk helmet hermit holiday honey horse hospital hotel iceberg insect island ivory jacket jaguar jewel
judge jungle kettle keyboard kitchen kitten ladder lagoon lamp lantern lawyer lemon leopard letter library lizard
lobster magnet mango maple marble market meadow medal melon mirror monkey morning mosquito mountain museum mushroom
napkin needle neighbour nephew notebook nurse ocean office olive onion orange orchard otter oven oyster paddle painter
palace panther paper parrot peach peanut pebble pelican pencil pepper piano pigeon pillow pilot pirate planet poet
pond potato prince puzzle pyramid rabbit radio ranger ribbon river robin rocket saddle sailor salad sandal scarf
scissors shadow shelf shepherd shoulder singer sister skeleton sled snail soldier spider spinach spoon squirrel
stadium statue stomach stone summer sunset swan tailor teacher temple theatre thunder tiger toast tomato tower tractor
train trumpet tunnel turtle umbrella uncle valley vessel village vinegar violin volcano waiter walnut weasel whale
wheel whistle widow window winter wizard wolf zebra
"""
ADJECTIVES, NOUNS = tuple(_ADJECTIVES.split()), tuple(_NOUNS.split())
