import "base/gpt.plt"

model {
  weights = pretrained("absent", quantize = nf4) #! E0731 W0712
}
