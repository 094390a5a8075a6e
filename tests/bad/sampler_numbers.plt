import "base/digits.plt"

data {
  sampler = weighted("base/cards.toml", samples = 2000, replacement = false) #! E0318 E0318
}
