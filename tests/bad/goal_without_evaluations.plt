import "base/gpt.plt"

checkpoint {
  best = lowest(loss) #! E0317
}
