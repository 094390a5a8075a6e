import "../base/gpt.plt"

model {
  network = python("adapters:Odd")
  weights = pretrained("absent", quantize = nf4) #! E0732 W0712
  adapter = lora(4, "inner")
}

data {
  source = stdlib(context = 32)
}
