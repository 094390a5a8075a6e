import "base/digits.plt"

devices {
  gpus      = 2
  kind      = lab_card
  catalogue = "base/cards.toml"
}
