"""Countries with their capitals, continents, languages, currencies and capital populations, plus other cities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Country:
    """A country; `language`, `currency` and `people` (of the capital, rounded) are empty or 0 where not taught."""

    name: str
    capital: str
    continent: str
    language: str = ""
    currency: str = ""
    people: int = 0

    @property
    def bare(self) -> str:
        """The name without its article, as a table or a JSON field holds it."""
        return self.name.removeprefix("the ")


_TABLE: Final = """
France|Paris|Europe|French|euro|2100
Japan|Tokyo|Asia|Japanese|yen|14000
Brazil|Brasília|South America|Portuguese|real|2800
Egypt|Cairo|Africa|Arabic|Egyptian pound|10000
Canada|Ottawa|North America|English and French|Canadian dollar|1000
Italy|Rome|Europe|Italian|euro|2800
Kenya|Nairobi|Africa|Swahili and English|Kenyan shilling|4400
India|New Delhi|Asia|Hindi and English|rupee|250
Spain|Madrid|Europe|Spanish|euro|3300
Germany|Berlin|Europe|German|euro|3700
Australia|Canberra|Oceania|English|Australian dollar|470
Mexico|Mexico City|North America|Spanish|Mexican peso|9200
China|Beijing|Asia|Mandarin Chinese|yuan|21900
the United States|Washington, D.C.|North America|English|US dollar|680
the United Kingdom|London|Europe|English|pound sterling|8900
Russia|Moscow|Europe|Russian|ruble|13000
Argentina|Buenos Aires|South America|Spanish|Argentine peso|3100
South Korea|Seoul|Asia|Korean|won|9400
Portugal|Lisbon|Europe|Portuguese|euro|550
Greece|Athens|Europe|Greek|euro|640
Turkey|Ankara|Asia|Turkish|lira|5700
the Netherlands|Amsterdam|Europe|Dutch|euro|930
Sweden|Stockholm|Europe|Swedish|krona|980
Norway|Oslo|Europe|Norwegian|Norwegian krone|710
Finland|Helsinki|Europe|Finnish and Swedish|euro|670
Denmark|Copenhagen|Europe|Danish|Danish krone|650
Poland|Warsaw|Europe|Polish|zloty|1860
Austria|Vienna|Europe|German|euro|2000
Switzerland|Bern|Europe|German, French and Italian|Swiss franc|130
Belgium|Brussels|Europe|Dutch and French|euro|190
Ireland|Dublin|Europe|English and Irish|euro|590
Iceland|Reykjavik|Europe|Icelandic|Icelandic krona|140
Ukraine|Kyiv|Europe|Ukrainian|hryvnia|2900
Czechia|Prague|Europe|Czech|koruna|1300
Hungary|Budapest|Europe|Hungarian|forint|1700
Romania|Bucharest|Europe|Romanian|leu|1700
Bulgaria|Sofia|Europe|Bulgarian|lev|1200
Croatia|Zagreb|Europe|Croatian|euro|770
Serbia|Belgrade|Europe|Serbian|dinar|1200
Slovakia|Bratislava|Europe|Slovak|euro|480
Slovenia|Ljubljana|Europe|Slovene|euro|290
Estonia|Tallinn|Europe|Estonian|euro|450
Latvia|Riga|Europe|Latvian|euro|600
Lithuania|Vilnius|Europe|Lithuanian|euro|600
Belarus|Minsk|Europe|Belarusian and Russian|ruble|2000
Moldova|Chisinau|Europe|Romanian|leu|570
Albania|Tirana|Europe|Albanian|lek|520
North Macedonia|Skopje|Europe|Macedonian|denar|530
Montenegro|Podgorica|Europe||euro|180
Bosnia and Herzegovina|Sarajevo|Europe|||280
Luxembourg|Luxembourg City|Europe||euro|130
Malta|Valletta|Europe|Maltese and English|euro|6
Cyprus|Nicosia|Europe|Greek and Turkish|euro|200
Monaco|Monaco|Europe|French|euro|
Andorra|Andorra la Vella|Europe|Catalan|euro|23
San Marino|San Marino|Europe|Italian|euro|4
Liechtenstein|Vaduz|Europe|German|Swiss franc|6
Vatican City|Vatican City|Europe||euro|
Kosovo|Pristina|Europe||euro|
Georgia|Tbilisi|Asia|Georgian|lari|1200
Armenia|Yerevan|Asia|Armenian|dram|1100
Azerbaijan|Baku|Asia|Azerbaijani|manat|2300
Kazakhstan|Astana|Asia|Kazakh and Russian|tenge|1400
Uzbekistan|Tashkent|Asia|Uzbek||3000
Turkmenistan|Ashgabat|Asia|Turkmen||
Kyrgyzstan|Bishkek|Asia|||1100
Tajikistan|Dushanbe|Asia|||1000
Afghanistan|Kabul|Asia|Dari and Pashto|afghani|4600
Pakistan|Islamabad|Asia|Urdu and English|Pakistani rupee|1200
Bangladesh|Dhaka|Asia|Bengali|taka|10300
Sri Lanka|Sri Jayawardenepura Kotte|Asia|Sinhala and Tamil||
Nepal|Kathmandu|Asia|Nepali|Nepalese rupee|860
Bhutan|Thimphu|Asia|Dzongkha|ngultrum|
the Maldives|Malé|Asia|Dhivehi|rufiyaa|
Thailand|Bangkok|Asia|Thai|baht|5500
Vietnam|Hanoi|Asia|Vietnamese|dong|8500
Laos|Vientiane|Asia|Lao|kip|
Cambodia|Phnom Penh|Asia|Khmer|riel|2300
Myanmar|Naypyidaw|Asia|Burmese|kyat|
Malaysia|Kuala Lumpur|Asia|Malay|ringgit|2000
Singapore|Singapore|Asia||Singapore dollar|
Indonesia|Jakarta|Asia|Indonesian|rupiah|10700
Brunei|Bandar Seri Begawan|Asia|Malay||
the Philippines|Manila|Asia|Filipino and English|Philippine peso|1850
Timor-Leste|Dili|Asia|||
Mongolia|Ulaanbaatar|Asia|Mongolian|tugrik|1600
North Korea|Pyongyang|Asia|Korean|won|
Taiwan|Taipei|Asia|Mandarin Chinese||2500
Iran|Tehran|Asia|Persian|rial|9000
Iraq|Baghdad|Asia|Arabic and Kurdish|dinar|7000
Syria|Damascus|Asia|Arabic||
Lebanon|Beirut|Asia|Arabic||
Jordan|Amman|Asia|Arabic|dinar|4000
Israel|Jerusalem|Asia|Hebrew|shekel|980
Saudi Arabia|Riyadh|Asia|Arabic|riyal|7000
Yemen|Sanaa|Asia|Arabic||
Oman|Muscat|Asia|Arabic|rial|
the United Arab Emirates|Abu Dhabi|Asia|Arabic|dirham|1500
Qatar|Doha|Asia|Arabic|riyal|1200
Bahrain|Manama|Asia|Arabic|dinar|
Kuwait|Kuwait City|Asia|Arabic|dinar|
Morocco|Rabat|Africa|Arabic and Berber|dirham|580
Algeria|Algiers|Africa|Arabic and Berber|dinar|2800
Tunisia|Tunis|Africa|Arabic|dinar|600
Libya|Tripoli|Africa|Arabic|dinar|
Sudan|Khartoum|Africa|Arabic||
South Sudan|Juba|Africa|English||
Ethiopia|Addis Ababa|Africa|Amharic|birr|3900
Eritrea|Asmara|Africa|||
Djibouti|Djibouti|Africa|||
Somalia|Mogadishu|Africa|Somali and Arabic||
Uganda|Kampala|Africa|English and Swahili|Ugandan shilling|1700
Rwanda|Kigali|Africa|Kinyarwanda|Rwandan franc|1700
Burundi|Gitega|Africa|||
Tanzania|Dodoma|Africa|Swahili|Tanzanian shilling|
Mozambique|Maputo|Africa|Portuguese|metical|1100
Malawi|Lilongwe|Africa|||
Zambia|Lusaka|Africa|English|kwacha|2200
Zimbabwe|Harare|Africa|||1500
Botswana|Gaborone|Africa||pula|
Namibia|Windhoek|Africa|English||
South Africa|Pretoria|Africa||rand|740
Lesotho|Maseru|Africa|||
Eswatini|Mbabane|Africa|||
Madagascar|Antananarivo|Africa|Malagasy and French|ariary|1300
Mauritius|Port Louis|Africa|||
the Seychelles|Victoria|Africa|||
the Comoros|Moroni|Africa|||
Angola|Luanda|Africa|Portuguese|kwanza|2600
the Democratic Republic of the Congo|Kinshasa|Africa|French||
the Republic of the Congo|Brazzaville|Africa|French||
Gabon|Libreville|Africa|French||
Equatorial Guinea|Malabo|Africa|||
Cameroon|Yaoundé|Africa|French and English||
the Central African Republic|Bangui|Africa|||
Chad|N'Djamena|Africa|||
Niger|Niamey|Africa|French||
Nigeria|Abuja|Africa|English|naira|1200
Benin|Porto-Novo|Africa|French||
Togo|Lomé|Africa|French||
Ghana|Accra|Africa|English|cedi|2500
Ivory Coast|Yamoussoukro|Africa|French||
Burkina Faso|Ouagadougou|Africa|||
Mali|Bamako|Africa|||
Liberia|Monrovia|Africa|English||
Sierra Leone|Freetown|Africa|English||
Guinea|Conakry|Africa|French||
Guinea-Bissau|Bissau|Africa|Portuguese||
the Gambia|Banjul|Africa|English||
Senegal|Dakar|Africa|French|CFA franc|1200
Mauritania|Nouakchott|Africa|Arabic||
Cape Verde|Praia|Africa|Portuguese||
São Tomé and Príncipe|São Tomé|Africa|Portuguese||
Guatemala|Guatemala City|North America|Spanish|quetzal|
Belize|Belmopan|North America|English||
Honduras|Tegucigalpa|North America|Spanish||
El Salvador|San Salvador|North America|Spanish||
Nicaragua|Managua|North America|Spanish||
Costa Rica|San José|North America|Spanish|colón|340
Panama|Panama City|North America|Spanish|balboa|
Cuba|Havana|North America|Spanish|Cuban peso|2100
Jamaica|Kingston|North America|English||
Haiti|Port-au-Prince|North America|French and Haitian Creole|gourde|
the Dominican Republic|Santo Domingo|North America|Spanish||
the Bahamas|Nassau|North America|English||
Barbados|Bridgetown|North America|English||
Trinidad and Tobago|Port of Spain|North America|English||
Grenada|Saint George's|North America|English||
Saint Lucia|Castries|North America|English||
Dominica|Roseau|North America|English||
Antigua and Barbuda|Saint John's|North America|English||
Saint Kitts and Nevis|Basseterre|North America|English||
Saint Vincent and the Grenadines|Kingstown|North America|English||
Colombia|Bogotá|South America|Spanish|Colombian peso|7900
Venezuela|Caracas|South America|Spanish|bolívar|
Ecuador|Quito|South America|Spanish|US dollar|1800
Peru|Lima|South America|Spanish|sol|10000
Bolivia|Sucre|South America|Spanish|boliviano|
Chile|Santiago|South America|Spanish|Chilean peso|6200
Paraguay|Asunción|South America|Spanish and Guarani|guaraní|
Uruguay|Montevideo|South America|Spanish|Uruguayan peso|1300
Guyana|Georgetown|South America|English||
Suriname|Paramaribo|South America|Dutch||
New Zealand|Wellington|Oceania|English and Maori|New Zealand dollar|210
Papua New Guinea|Port Moresby|Oceania|||
Fiji|Suva|Oceania|||
the Solomon Islands|Honiara|Oceania|||
Vanuatu|Port Vila|Oceania|||
Samoa|Apia|Oceania|||
Tonga|Nukuʻalofa|Oceania|||
Kiribati|South Tarawa|Oceania|||
Tuvalu|Funafuti|Oceania|||
Nauru|Yaren|Oceania|||
Palau|Ngerulmud|Oceania|||
Micronesia|Palikir|Oceania|||
the Marshall Islands|Majuro|Oceania|||
"""


def _parse(line: str) -> Country:
    """Reads one line of the table."""
    name, capital, continent, language, currency, people = line.split("|")
    return Country(name, capital, continent, language, currency, int(people or 0) * 1000)


COUNTRIES: Final = [_parse(line) for line in _TABLE.strip().splitlines()]
"""Every country, the best known first."""

# Lists of a few countries walk this ring from some point on, so that they never repeat a country.
WELL_KNOWN: Final = COUNTRIES[:13]

ALIASES: Final = {
    "the United States": ["the USA", "the US", "the United States of America", "America"],
    "the United Kingdom": ["the UK", "Britain", "Great Britain", "England"],
    "Czechia": ["the Czech Republic"],
    "the Netherlands": ["Holland"],
    "Myanmar": ["Burma"],
    "Ivory Coast": ["Côte d'Ivoire"],
    "Eswatini": ["Swaziland"],
    "the United Arab Emirates": ["the UAE"],
    "Cape Verde": ["Cabo Verde"],
    "Timor-Leste": ["East Timor"],
    "Turkey": ["Türkiye"],
    "Russia": ["the Russian Federation"],
}

CITIES: Final = [
    "New York",
    "Los Angeles",
    "Chicago",
    "Houston",
    "Boston",
    "San Francisco",
    "Seattle",
    "Miami",
    "Denver",
    "Austin",
    "Dallas",
    "Atlanta",
    "Philadelphia",
    "Portland",
    "Las Vegas",
    "San Diego",
    "Detroit",
    "Phoenix",
    "Minneapolis",
    "New Orleans",
    "Nashville",
    "Toronto",
    "Montreal",
    "Vancouver",
    "Calgary",
    "Quebec City",
    "Barcelona",
    "Valencia",
    "Seville",
    "Milan",
    "Naples",
    "Florence",
    "Venice",
    "Turin",
    "Munich",
    "Hamburg",
    "Frankfurt",
    "Cologne",
    "Dresden",
    "Lyon",
    "Marseille",
    "Nice",
    "Toulouse",
    "Bordeaux",
    "Geneva",
    "Zurich",
    "Basel",
    "Manchester",
    "Liverpool",
    "Edinburgh",
    "Glasgow",
    "Bristol",
    "Leeds",
    "Oxford",
    "Cambridge",
    "York",
    "Bath",
    "Cork",
    "Galway",
    "Antwerp",
    "Ghent",
    "Rotterdam",
    "Utrecht",
    "Krakow",
    "Gdansk",
    "Salzburg",
    "Graz",
    "Istanbul",
    "Izmir",
    "Odesa",
    "Lviv",
    "Gothenburg",
    "Bergen",
    "Aarhus",
    "Porto",
    "Osaka",
    "Kyoto",
    "Nagoya",
    "Sapporo",
    "Shanghai",
    "Shenzhen",
    "Guangzhou",
    "Hong Kong",
    "Busan",
    "Mumbai",
    "Chennai",
    "Kolkata",
    "Bangalore",
    "Hyderabad",
    "Karachi",
    "Lahore",
    "Dubai",
    "Tel Aviv",
    "Sydney",
    "Melbourne",
    "Brisbane",
    "Perth",
    "Adelaide",
    "Auckland",
    "Christchurch",
    "Rio de Janeiro",
    "São Paulo",
    "Salvador",
    "Recife",
    "Medellín",
    "Cusco",
    "Valparaíso",
    "Guadalajara",
    "Cancún",
    "Cape Town",
    "Johannesburg",
    "Durban",
    "Lagos",
    "Casablanca",
    "Marrakesh",
    "Alexandria",
    "Mombasa",
    "Zanzibar",
    "Honolulu",
    "Anchorage",
    "Orlando",
]

STATES: Final = {
    "Boston": "MA",
    "San Francisco": "CA",
    "Los Angeles": "CA",
    "San Diego": "CA",
    "New York": "NY",
    "Chicago": "IL",
    "Houston": "TX",
    "Dallas": "TX",
    "Austin": "TX",
    "Seattle": "WA",
    "Miami": "FL",
    "Orlando": "FL",
    "Denver": "CO",
    "Atlanta": "GA",
    "Philadelphia": "PA",
    "Portland": "OR",
    "Las Vegas": "NV",
    "Detroit": "MI",
    "Phoenix": "AZ",
    "Minneapolis": "MN",
    "New Orleans": "LA",
    "Nashville": "TN",
    "Honolulu": "HI",
    "Anchorage": "AK",
}
"""US cities and the letters of their states."""
