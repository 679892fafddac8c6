"""Files of the web page: plain HTML, CSS and JavaScript, used as they are."""
