import "base/digits.plt"

devices {
  gpus      = 2
  kind      = h100
  catalogue = "base/no_cards.toml" #! E0421
}
