param model.width = 3
