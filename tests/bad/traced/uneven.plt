import "../base/own.plt"

model {
  network = python("nets:network") #! E0417
}

devices {
  cpus = 3
}

data {
  batch = 9
}

parallelism {
  tensor      = 3
  tensor_plan = ["up: gathered", "down: row_of_whole"]
}
